"""`meanbank plan`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from meanbank.cli.amounts import bytes_of, tokens_of
from meanbank.cli.overrides import Overrides, listed
from meanbank.cli.tables import table

if TYPE_CHECKING:
    from rich.table import Table

    from meanbank.training.matching import Proposal
    from meanbank.training.planning import Plan


def plan(
    config: Annotated[str, tyro.conf.Positional],
    /,
    set: Overrides = (),
    flops: float | None = None,
    tokens: float | None = None,
    convention: Literal["exact", "papers"] = "exact",
    match: str | None = None,
    by: Literal["params", "tokens", "flops"] | None = None,
    context: str | None = None,
    batch: int | None = None,
    dtype: str | None = None,
    budget: str | None = None,
    train_length: str | None = None,
    json: Path | None = None,
) -> int:
    """Tell what a run would cost, without data or weights, or what would make two runs comparable.

    Args:
        config: a YAML file, or the name of a bundled configuration such as quick/kvm_sqrt.
        set: change one setting, as for `meanbank train`.
        flops: spend that many training FLOPs, whatever steps the configuration says.
        tokens: train on that many tokens, whatever steps the configuration says.
        convention: how FLOPs are counted: exact counts every matrix product and the rows that each
            query sees; papers counts as the BoV authors do (6 a weight, whole windows).
        match: another configuration; proposes settings that make the first comparable with it.
        by: what is to be equal then: parameters, training tokens or training FLOPs.
        context: tokens of a sequence (4096, 128K, 1M); tells the bytes of serving them, beside full
            attention with projected values. It, or any of the next four, asks for that.
        batch: sequences that are served at a time (1).
        dtype: of weights and values as they are served: fp32 (the default), bf16 or fp16.
        budget: bytes that serving may take (24GB, 24GiB); tells the largest context that fits.
        train_length: tokens of a training sequence; tells the bytes of a training step.
        json: also write the figures to this file.
    """
    import dataclasses

    from rich.console import Console

    from meanbank.core.files import write_json
    from meanbank.training import load_config
    from meanbank.training.matching import match as proposals_for
    from meanbank.training.planning import plan_run

    sizes = _sizes(context, batch, dtype, budget, train_length)

    footprint = None
    overrides = listed(set)
    if (match is None) != (by is None):
        raise ValueError("--match and --by belong together: what to compare with, and by what")
    if match is not None and by is not None:
        if flops is not None or tokens is not None:
            raise ValueError("--match takes the other run's budget: leave out --flops and --tokens")
        if sizes:
            raise ValueError("--match compares training: leave out --context, --batch and the like")
        results = proposals_for(config, match, by, overrides, convention)
        tables = [_proposals(results, config, match, by)]
    else:
        settings = load_config(config, overrides)
        results = [plan_run(settings, flops=flops, tokens=tokens, convention=convention)]
        tables = _tables(results[0])
        if sizes:
            from meanbank.cli.plan_memory import memory_tables
            from meanbank.training.footprint import plan_footprint

            footprint = plan_footprint(settings, **sizes)
            tables += memory_tables(footprint)
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own, and rich would take 80 columns
        console = Console(width=100)
    for shown in tables:
        console.print(shown)
    if json is not None:
        plain = [dataclasses.asdict(result) for result in results]
        if footprint is not None:
            plain[0]["footprint"] = footprint.plain()
        write_json(json, {"proposals": plain} if match is not None else plain[0])
    return 0


def _sizes(
    context: str | None,
    batch: int | None,
    dtype: str | None,
    budget: str | None,
    train_length: str | None,
) -> dict[str, Any]:
    """What `plan_footprint` is given: what the command line says."""
    if batch is not None and batch < 1:
        raise ValueError(f"--batch must be at least 1, got {batch}")
    sizes: dict[str, Any] = {
        "context": None if context is None else tokens_of("--context", context),
        "batch": batch,
        "dtype": dtype,
        "budget": None if budget is None else bytes_of("--budget", budget),
        "train_length": None if train_length is None else tokens_of("--train-length", train_length),
    }
    return {name: value for name, value in sizes.items() if value is not None}


def _tables(plan: Plan) -> list[Table]:
    """A plan as tables."""
    parameters = [
        *plan.parameters.items(),
        ("all", plan.num_parameters),
    ]
    parts = [(name, part.forward, part.backward, part.total) for name, part in plan.flops.items()]
    sums = [sum(column) for column in zip(*(part[1:] for part in parts), strict=True)]
    run = [
        ("vocabulary", plan.vocab_size),
        ("tokens a sequence", plan.sequence_length),
        ("tokens a step", plan.tokens_per_step),
        ("steps", plan.steps),
        ("tokens", plan.tokens),
        ("training FLOPs", plan.training_flops),
    ]
    groups = [
        (
            group.name,
            group.tensors,
            group.elements,
            group.learning_rate,
            group.weight_decay,
            "Muon" if group.betas is None else "/".join(f"{beta:g}" for beta in group.betas),
        )
        for group in plan.groups
    ]
    memory = [
        ("state of one sequence, at most", plan.memory.state),
        ("saved by banks (ids for values)", plan.memory.saved_by_banks),
        ("tables over token ids, once", plan.memory.tables),
    ]
    length = f"{plan.sequence_length:,} tokens"
    return [
        table(f"parameters: {plan.description}", ["part", "parameters"], parameters),
        table(
            f"FLOPs a token at {length} ({plan.convention})",
            ["part", "forward", "backward", "both"],
            [*parts, ("all", *sums)],
        ),
        table("training", ["", "run"], run),
        *_batches(plan),
        table(
            "optimizer groups, peak rates",
            ["group", "tensors", "elements", "learning rate", "decay", "betas"],
            groups,
        ),
        table(f"memory after {length} ({plan.memory.dtype})", ["", "bytes"], memory),
    ]


def _batches(plan: Plan) -> list[Table]:
    """The shapes of batches, where a run has several."""
    if len(plan.stages) == 1:
        return []
    ends = itertools.accumulate(stage.steps for stage in plan.stages)
    rows = [(end, of.rows, of.length) for end, of in zip(ends, plan.stages, strict=True)]
    return [table("batches", ["to step", "rows", "tokens a row"], rows)]


def _proposals(results: list[Proposal], config: str, other: str, by: str) -> Table:
    """Proposals as a table, each with what to add to the command line."""
    names = {"params": "parameters", "tokens": "tokens", "flops": "training FLOPs"}
    rows = [
        (
            f"--set {' '.join(proposal.overrides)}",
            proposal.ours,
            proposal.theirs,
            f"{proposal.difference_percent:+.2f} %",
        )
        for proposal in results
    ]
    columns = ["setting", names[by], "wanted", "difference"]
    return table(f"{config} at equal {names[by]} with {other}", columns, rows)
