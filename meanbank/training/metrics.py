"""Metrics of a run: one JSON line each, and TensorBoard where that extra is installed."""

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from meanbank.core.files import write_text

TAIL = 4096  # bytes that hold a few lines


class Metrics:
    """Appends to `metrics.jsonl`; an earlier try's lines after `first_step` steps are dropped."""

    def __init__(self, path: Path, first_step: int) -> None:
        if path.is_file():
            lines = [line for line in read_metrics(path) if line["step"] <= first_step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = path.open("a", encoding="utf-8")
        self._board = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, **values: Any) -> None:
        """One line: the step (counted from 1) and plain numbers."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; one that a crash cut short at the end is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
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
