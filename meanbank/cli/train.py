"""`meanbank train`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from meanbank.cli.overrides import Overrides, listed


def train(
    config: Annotated[str, tyro.conf.Positional],
    /,
    set: Overrides = (),
    out: Path | None = None,
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Train a model; on several ranks with torchrun -m meanbank train.

    Args:
        config: a YAML file, or the name of a bundled configuration such as quick/kvm_sqrt.
        set: change one setting, for example training.steps=100 or
            model.plan.0.memory.budget.factor=8; takes several, and may be repeated.
        out: run folder; default runs/NAME-OF-CONFIG.
        resume: go on with an interrupted run.
        force: replace an earlier run.
    """
    from meanbank.training import Interrupted, load_config
    from meanbank.training import train as train_run
    from meanbank.training.ranks import together

    with together() as ranks:
        settings = load_config(config, listed(set))
        folder = out or Path("runs") / Path(config).stem
        if resume and force:
            raise ValueError("--resume and --force exclude each other")
        try:
            train_run(settings, folder, resume=resume, force=force)
        except Interrupted as stop:
            if not ranks.leads:
                ranks.leave(128 + stop.number)
            print(f"meanbank: {stop}; go on with the same command and --resume", file=sys.stderr)
            return 128 + stop.number
        if ranks.leads:
            print(f"run: {folder} ({last_figures(folder)})")
    return 0


def last_figures(run: Path) -> str:
    """The last step's loss and the last held-out result of a run."""
    from meanbank.training.metrics import read_metrics
    from meanbank.training.run import METRICS

    figures: dict[str, float] = {}
    for line in read_metrics(run / METRICS):
        figures.update(line)
    parts = [f"step {figures['step']}", f"loss {figures['loss']:.3f}"]
    if "held_out_bpb" in figures:
        parts.append(f"held-out {figures['held_out_bpb']:.3f} bits per byte")
    return ", ".join(parts)
