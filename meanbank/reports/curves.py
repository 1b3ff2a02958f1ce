"""The curves of one run, as a table with small lines of blocks and as a figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meanbank.reports.canvas import png_file
from meanbank.reports.files import as_count, as_number, read_json_lines
from meanbank.reports.tables import Row, Table

CURVES = {
    "loss": "loss (nats)",
    "held_out_bpb": "held-out bits per byte",
    "learning_rate": "learning rate",
    "gradient_norm": "gradient norm",
}
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40

Points = tuple[tuple[int, float], ...]


def run_curves(run: Path | str) -> dict[str, Points]:
    """(step, value) by name of `CURVES`, of what the run has; ValueError where it has nothing."""
    lines = read_json_lines(Path(run) / "metrics.jsonl")
    found = {name: points for name in CURVES if (points := by_step(lines, name))}
    if not found:
        raise ValueError(f"{run} has no metrics yet")
    return found


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """A line of at most `width` blocks, each the mean of its share; a gap where none is finite."""
    count = min(width, len(values))
    means = []
    for index in range(count):
        share = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [value for value in share if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * count
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if m is None else BLOCKS[round((m - low) * scale)] for m in means)


def curve_table(run: Path | str) -> Table:
    """A row a curve: its line, its first, least and last value."""
    rows = []
    for name, points in run_curves(run).items():
        values = [value for _, value in points]
        figures = (values[0], min(values, key=_order), values[-1])
        cells = (CURVES[name], sparkline(values), *(f"{value:.4g}" for value in figures))
        rows.append(Row(cells=cells))
    return Table(
        title=Path(run).name,
        meaning=(),
        columns=("Curve", "Over steps", "First", "Least", "Last"),
        rows=tuple(rows),
        text_columns=2,
    )


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def draw_curves(run: Path | str, path: Path) -> None:
    """Save the curves as a PNG file, a panel each."""
    curves = run_curves(run)
    with png_file(path, (7.2, 4.6)) as canvas:
        panels: Any = canvas.subplots(2, 2, squeeze=False)
        for axes, (name, label) in zip(panels.flat, CURVES.items(), strict=True):
            axes.set_title(label)
            axes.set_xlabel("steps")
            points = curves.get(name)
            if points is None:
                axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
                continue
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color="#0072B2", marker="o" if len(points) < 20 else "")


def by_step(lines: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of the lines of a run's metrics that have such a value, by step."""
    # A resumed run repeats the steps after its checkpoint: the later line counts.
    values: dict[int, float] = {}
    for line in lines:
        step, value = as_count(line.get("step")), as_number(line.get(key))
        if step is not None and value is not None:
            values[step] = value
    return tuple(sorted(values.items()))
