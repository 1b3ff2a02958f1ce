"""Metrics of a run: one JSON line each, which the trackers of the run are told, too."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meanbank.core.files import told, write_text
from meanbank.training.trackers import Trackers

TAIL = 4096  # bytes that hold a few lines


class Metrics:
    """Appends to `metrics.jsonl`; an earlier try's lines after `first_step` steps are dropped."""

    def __init__(self, path: Path, first_step: int, trackers: Trackers | None = None) -> None:
        self.kept = cut_back(path, first_step)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._trackers = trackers or Trackers()

    def kept_at(self, step: int, name: str) -> bool:
        """Whether an earlier try has left such a figure of a step."""
        return any(line["step"] == step and name in line for line in self.kept)

    def write(self, step: int, **values: Any) -> None:
        """One line: the step (counted from 1) and plain numbers."""
        line = json.dumps({"step": step, **values}).encode("utf-8") + b"\n"
        with told(self._path):
            while line:  # a disk that is nearly full takes a part
                line = line[self._file.write(line) :]
        self._trackers.log(step, values)

    def sync(self) -> None:
        """Have all lines on disk."""
        with told(self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class NoMetrics(Metrics):
    """Writes nothing: of several ranks, one does."""

    def __init__(self) -> None:
        self.kept = []

    def write(self, step: int, **values: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Stopwatch:
    """Seconds that the parts of something took, by name, added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Leave the lines up to a step in a file, where it is there; returns them."""
    if not path.is_file():
        return []
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, up to one that a crash has cut short."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            break
        lines.append(value)
    return lines


def last_tokens(path: Path) -> int:
    """Tokens trained on by the last whole line that says so; 0 where there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:  # only its end: it is asked for again and again as a run goes on
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        if line.endswith(b"\n") and line.startswith(b"{"):
            with contextlib.suppress(ValueError, TypeError):
                tokens = json.loads(line).get("tokens")
                if tokens is not None:
                    return tokens
    return 0


def training_seconds(path: Path) -> float:
    """Seconds of all training steps, whatever number of tries they took."""
    total, before = 0.0, 0
    for line in read_metrics(path):
        if "tokens" in line:
            total += (line["tokens"] - before) / line["tokens_per_second"]
            before = line["tokens"]
    return total
