"""A run as its result files tell it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meanbank.reports.curves import Points, by_step
from meanbank.reports.files import as_count, as_objects, read_json_lines, read_object


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is in the folder of a run.

    info: of `run.json`; lines: of `metrics.jsonl`; statistics: the layers of each line of
    `statistics.jsonl`, by step. state, reason: what became of it.
    """

    name: str
    info: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    statistics: Mapping[int, Sequence[Mapping[str, Any]]]
    state: str = ""
    reason: str | None = None

    def series(self, name: str) -> Points:
        """(step, value) of a metric."""
        return by_step(self.lines, name)

    def names(self, start: str = "", end: str = "") -> list[str]:
        """Metrics whose names begin and end so, in order of first appearance."""
        names = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in names if name.startswith(start) and name.endswith(end)]


def load_run(folder: Path, *, state: str = "", reason: str | None = None) -> Run:
    """Read the folder of a run; ValueError where it has no metrics yet."""
    lines = read_json_lines(folder / "metrics.jsonl")
    if not by_step(lines, "loss"):
        raise ValueError(f"{folder} has no metrics yet")
    found = {}
    for line in read_json_lines(folder / "statistics.jsonl"):
        step = as_count(line.get("step"))
        if step is not None:  # the later line of a step counts
            found[step] = as_objects(line.get("layers"))
    return Run(
        name=folder.resolve().name,
        info=read_object(folder / "run.json"),
        lines=lines,
        statistics=dict(sorted(found.items())),
        state=state,
        reason=reason,
    )
