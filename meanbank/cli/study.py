"""`meanbank study`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from meanbank.cli.overrides import Overrides, listed
from meanbank.cli.tables import console, table

if TYPE_CHECKING:
    from meanbank.studies.engine import Outcome
    from meanbank.studies.resolve import Arm

Arms = Annotated[str, tyro.conf.arg(metavar="ARM,ARM")]


def run_study(
    study: Annotated[str, tyro.conf.Positional],
    /,
    set: Overrides = (),
    out: Path | None = None,
    jobs: int | None = None,
    only: Arms = "",
    tuning: bool = True,
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    slurm: Overrides = (),
) -> int:
    """Train and evaluate the arms of a study, with every seed, and report; what is finished stays.

    Exit code 1 where a run failed; the others are finished nevertheless.

    Args:
        study: a study file, or the name of a bundled one such as quick.
        set: change one setting of the file, for example seeds=[1,2] or
            groups.GROUP.arms.ARM.model.name=FOLDER; takes several, and may be repeated.
        out: folder of the study; default runs/NAME-OF-STUDY.
        jobs: processes at a time; default one for each core, at most 4.
        only: these arms alone.
        tuning: also with the seeds that settings were chosen on.
        force: make arms anew whose training settings have changed.
        slurm: run on a cluster with Slurm, in one array of jobs, with settings of submitit such as
            partition=gpu timeout_min=240 gpus_per_node=1.
    """
    from meanbank.studies import engine
    from meanbank.studies.launch import Processes, Slurm
    from meanbank.studies.resolve import load_study

    resolved = load_study(study, listed(set))
    folder = out or Path("runs") / resolved.name
    if slurm and jobs is not None:
        raise ValueError("--jobs is of processes here: with --slurm, give array_parallelism=N")
    launcher = (
        Slurm(folder / ".slurm", _parameters(listed(slurm)))
        if slurm
        else Processes(min(4, os.cpu_count() or 1) if jobs is None else jobs)
    )
    chosen = [name.strip() for name in only.split(",") if name.strip()]
    outcome = engine.run_study(resolved, folder, launcher, only=chosen, tuning=tuning, force=force)
    _tell(outcome, folder)
    if outcome.stopped is None:
        report(folder)
    return outcome.exit_code


def report(folder: Annotated[Path, tyro.conf.Positional], /, page: Path | None = None) -> int:
    """Write the report of a study: verdicts on its claims, tables and figures.

    Args:
        folder: of the study.
        page: also write a short page with small figures into this folder, to be published, and
            the overview over all pages beside it.
    """
    from meanbank.reports import print_table, study_tables, write_results_page
    from meanbank.studies.report import report_study

    path = report_study(folder)
    for shown in study_tables(folder):
        print_table(shown)
    print(f"report: {path}")
    if page is not None:
        for written in write_results_page(folder, page):
            print(f"page: {written}")
    return 0


def show_study(study: Annotated[str, tyro.conf.Positional], /, set: Overrides = ()) -> int:
    """Tell what a study would run and what that costs, and check all of it; trains nothing.

    Args:
        study: a study file, or the name of a bundled one such as quick.
        set: change one setting of the file, as for `meanbank study run`.
    """
    from meanbank.studies.resolve import load_study

    resolved = load_study(study, listed(set))
    out = console()
    out.print(f"{resolved.title}\n{resolved.description}".strip(), markup=False)
    jobs, tokens, flops = 0, 0, 0.0
    for group in resolved.groups.values():
        context = None if group.match is None else group.match.context
        rows = []
        for name, arm in group.arms.items():
            runs = len(arm.seeds) + (len(resolved.tuning_seeds) if arm.is_trained_here else 0)
            costs = _costs(arm, context)
            jobs, tokens = jobs + runs, tokens + runs * (costs[1] or 0)
            flops += runs * (costs[2] or 0)
            rows.append((name, *costs, runs))
        length = "the training length" if context is None else f"{context:,} tokens"
        columns = ["arm", "parameters", "tokens", "FLOPs", f"bytes at {length}", "runs"]
        out.print(table(group.label, columns, rows))
        for name, arm in group.arms.items():
            if arm.matched is not None:
                out.print(f"{name}: {_matched(arm)}", markup=False, highlight=False)
    claims = f", {len(resolved.claims)} claims" if resolved.claims else ""
    total = f"{jobs} runs in all, {tokens:,} training tokens, {flops:.3e} FLOPs{claims}"
    out.print(total, highlight=False)
    return 0


def run_job(
    out: Annotated[Path, tyro.conf.Positional],
    arm: Annotated[str, tyro.conf.Positional],
    seed: Annotated[int, tyro.conf.Positional],
    /,
    alone: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    parent: int | None = None,
) -> int:
    """Bring one run of a study to its end; `meanbank study run` starts one for each.

    Args:
        out: folder of the study.
        arm: name of the arm.
        seed: the run's.
        alone: nothing else runs beside it, so it may measure times.
        parent: the process that this one is to end with.
    """
    from meanbank.studies.launch import end_with

    if parent is not None:
        end_with(parent)
    from meanbank.studies import job
    from meanbank.training import Interrupted

    try:
        job.run_job(job.find_job(out, arm, seed), alone=alone)
    except Interrupted as stop:
        print(f"meanbank: {stop}")
        return 128 + stop.number
    return 0


STUDY = {"run": run_study, "report": report, "show": show_study, "job": run_job}


def _parameters(pairs: list[str]) -> dict[str, object]:
    """`KEY=VALUE` with YAML values."""
    from meanbank.core.config import yaml_value

    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise ValueError(f"--slurm takes settings such as partition=gpu, got {pair!r}")
    split = [pair.partition("=") for pair in pairs]
    return {key.removeprefix("slurm_"): yaml_value(value) for key, _, value in split}


def _costs(
    arm: Arm, context: int | None
) -> tuple[int | None, int | None, float | None, int | None]:
    """Parameters, training tokens and FLOPs, and bytes of one sequence of `context` tokens.

    None of a model that exists: it may not be there yet, and nothing is trained.
    """
    from meanbank.studies.spec import ExistingModel
    from meanbank.training.matching import memory_nbytes, num_parameters
    from meanbank.training.planning import (
        batch_shape,
        model_of,
        training_flops,
        training_tokens,
    )

    config = arm.config
    if isinstance(config, ExistingModel):
        return None, None, None, None
    return (
        num_parameters(config),
        training_tokens(config),
        training_flops(model_of(config), config),
        memory_nbytes(config, context or batch_shape(config)[0]),
    )


def _matched(arm: Arm) -> str:
    """What was changed in an arm to match another."""
    found = arm.matched
    assert found is not None
    what = f"{found.by} as {found.to}"
    return f"{what} with {' '.join(found.overrides)} ({found.difference_percent:+.2f} %)"


def _tell(outcome: Outcome, folder: Path) -> None:
    """What a study came to; its report has what failed, unless it was stopped before."""
    out = console()
    if outcome.failed and outcome.stopped is not None:
        rows = [(f["arm"], f["seed"], f["message"]) for f in outcome.failed]
        out.print(table("failed", ["arm", "seed", "what it said last"], rows))
    words = f"{folder}: {outcome.finished} runs finished, {len(outcome.failed)} failed"
    if outcome.failed:
        words += " (runs/ARM/seed-N.log has what they said)"
    if outcome.stopped is not None:
        words += "; stopped, go on with the same command"
    out.print(words, markup=False, highlight=False, soft_wrap=True)
