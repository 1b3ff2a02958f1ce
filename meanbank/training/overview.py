"""The runs of a folder, and how far they are."""

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

from meanbank.core.files import read_json
from meanbank.training.checkpoint import FOLDER
from meanbank.training.claim import status_of
from meanbank.training.metrics import read_metrics
from meanbank.training.run import CONFIG, METRICS, RUN

LATELY = 20  # steps that tell the speed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """A run as its files tell it; None where they do not.

    state: running (a process has it), done, stopped (by a signal) or failed, and the reason why.
    step, steps: done and wanted; tokens: read. loss: of the last step. tokens_per_second,
    seconds_left: by the last `LATELY` steps, for a run that is running.
    """

    path: Path
    state: str
    reason: str | None = None
    step: int = 0
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None


def find_runs(folder: Path) -> list[Path]:
    """The runs at or below a folder, by path; ValueError where there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give one that holds runs")
    found = (path.parent for path in folder.rglob(CONFIG))
    return sorted(run for run in found if FOLDER not in run.relative_to(folder).parts)


def state_of(run: Path) -> RunState:
    """How far a run is."""
    info: Any = read_json(run / RUN) if (run / RUN).is_file() else {}
    steps = info.get("steps") if isinstance(info, dict) else None
    lines = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
    lines = [line for line in lines if "loss" in line]
    last = lines[-1] if lines else {}
    step = last.get("step", 0)
    state, reason = status_of(run)
    if state is None:  # of a version that did not write it down
        state = "done" if step == steps else "stopped"
    running = state == "running"
    pace = _seconds_a_step(lines[-LATELY:]) if running and steps is not None else None
    return RunState(
        path=run,
        state=state,
        reason=reason,
        step=step,
        steps=steps,
        tokens=last.get("tokens"),
        loss=last.get("loss"),
        tokens_per_second=_median(line.get("tokens_per_second") for line in lines[-LATELY:]),
        seconds_left=None if pace is None else pace * (steps - step),
    )


def _seconds_a_step(lines: list[dict[str, Any]]) -> float | None:
    """Between lines, so that saving and evaluating count; a resumed run's clock begins again."""
    times = [line["seconds"] for line in lines if "seconds" in line]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    gaps = [gap for gap in gaps if gap >= 0]
    return sum(gaps) / len(gaps) if gaps else None


def _median(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
