"""`meanbank plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from meanbank.cli.train import Overrides

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
        json: also write the figures to this file.
    """
    import dataclasses

    from rich.console import Console

    from meanbank.core.files import write_json
    from meanbank.training import load_config
    from meanbank.training.matching import match as proposals_for
    from meanbank.training.planning import plan_run

    overrides = [override for group in set for override in group]
    if (match is None) != (by is None):
        raise ValueError("--match and --by belong together: what to compare with, and by what")
    if match is not None and by is not None:
        if flops is not None or tokens is not None:
            raise ValueError("--match takes the other run's budget: leave out --flops and --tokens")
        results = proposals_for(config, match, by, overrides, convention)
        tables = [_proposals(results, config, match, by)]
    else:
        settings = load_config(config, overrides)
        results = [plan_run(settings, flops=flops, tokens=tokens, convention=convention)]
        tables = _tables(results[0])
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own, and rich would take 80 columns
        console = Console(width=100)
    for table in tables:
        console.print(table)
    if json is not None:
        plain = [dataclasses.asdict(result) for result in results]
        write_json(json, {"proposals": plain} if match is not None else plain[0])
    return 0


def _table(title: str, columns: list[str], rows: list[tuple]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float) and value >= 1e15:
        return f"{value:.4e}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


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
        _table(f"parameters: {plan.description}", ["part", "parameters"], parameters),
        _table(
            f"FLOPs a token at {length} ({plan.convention})",
            ["part", "forward", "backward", "both"],
            [*parts, ("all", *sums)],
        ),
        _table("training", ["", "run"], run),
        _table(
            "optimizer groups, peak rates",
            ["group", "tensors", "elements", "learning rate", "decay", "betas"],
            groups,
        ),
        _table(f"memory after {length} ({plan.memory.dtype})", ["", "bytes"], memory),
    ]


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
    return _table(f"{config} at equal {names[by]} with {other}", columns, rows)
