"""The figure of a benchmark: time against length, both logarithmic."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.axes import label_ends, token_axis
from meanbank.reports.benchmarks import (
    Record,
    cells,
    first_faster,
    growth_exponent,
    label,
    points_of,
    seconds,
    series,
)
from meanbank.reports.canvas import png
from meanbank.reports.files import write_whole
from meanbank.reports.palette import BELOW, GUIDE, STYLES, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_PANEL = (3.5, 3.1)  # inches
_PANELS_A_ROW = 3
_CAPTION = (
    "Numbers: growth exponents of time over length. Rings: first length from which on KVM is "
    "faster than PyTorch's attention."
)

_DOTTED = (1.0, 1.2)
_SATURATING = Style(color="#009E73", marker="s")
_LINES: dict[tuple[str, str | None], Style] = {
    ("sdpa", None): Style(color="#CC79A7", marker="s"),
    ("full", None): STYLES["full"],
    ("ours", "fixed"): STYLES["kvm_fixed"],
    ("ours", "sqrt"): STYLES["kvm_sqrt"],
    ("ours", "saturating"): _SATURATING,
    ("reference", "fixed"): Style(color="#56B4E9", marker="", dashes=_DOTTED),
    ("reference", "sqrt"): Style(color="#0072B2", marker="", dashes=_DOTTED),
    ("reference", "saturating"): Style(color="#009E73", marker="", dashes=_DOTTED),
    ("fixed", None): STYLES["kvm_fixed"],
    ("sqrt", None): STYLES["kvm_sqrt"],
    ("saturating", None): _SATURATING,
}
_ANY = Style(color="#D55E00", marker="v", dashes=(5, 2))
_WHAT = {
    "training": "training step",
    "passes": "forward and backward",
    "prefill": "prefill",
    "backward": "backward pass",
    "decode": "decode, a token",
}


def draw_benchmark(records: Sequence[Record], path: Path) -> None:
    """Save the figure as a PNG file: a panel for each phase and dtype.

    A ring marks the first length from which on an arm is faster than PyTorch's attention; numbers
    at the right ends are growth exponents.
    """
    panels = list(_panels(records).items())
    columns = min(_PANELS_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    # A legend takes about the width of two panels.
    size = (max(6.4, _PANEL[0] * columns + 0.6), _PANEL[1] * lines + 0.9)

    def draw(canvas: "Canvas") -> None:
        grid: Any = canvas.subplots(lines, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, ((title, _), found) in zip(grid.flat, panels, strict=False):
            _draw(axes, title, found)
        _legend(canvas, [line for _, found in panels for line in series(found).values()])

    write_whole(path, png(size, draw))


def _panels(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by title and place: of a bank benchmark a panel for each memory."""
    panels: dict[tuple[str, str], list[Record]] = {}
    for (bench, phase, dtype), found in cells(records).items():
        for record in found:
            memory = f", {record['budget']}" if bench == "bank" else ""
            title = f"{_WHAT[phase]}{memory}, {dtype}"
            panels.setdefault((title, bench), []).append(record)
    return panels


def _style(line: Sequence[Record]) -> Style:
    arm, budget = line[0]["arm"], line[0].get("budget")
    if line[0]["bench"] == "bank":
        names = {"bank": _ANY, "cached": STYLES["full"], "projected": _LINES["sdpa", None]}
        return names[arm]
    memory, _, bank = arm.partition("+")
    style = _LINES.get((memory, budget), _ANY)
    return Style(color=style.color, marker=style.marker, dashes=(5, 2)) if bank else style


def _draw(axes: "Axes", title: str, found: Sequence[Record]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    by_arm = series(found)
    baseline = points_of(by_arm.get(("sdpa", None), []))
    ends = []
    for line in by_arm.values():
        points, style = points_of(line), _style(line)
        marker = style.marker if len(points) <= 12 else ""
        axes.plot(list(points), list(points.values()), marker=marker, **style.line)
        faster = first_faster(points, baseline)
        if faster is not None and line[0]["arm"] == "ours":
            axes.plot(
                [faster],
                [points[faster]],
                marker="o",
                markersize=11,
                markerfacecolor="none",
                markeredgecolor=style.color,
                linestyle="none",
            )
        exponent = growth_exponent(points)
        if exponent is not None and line[0]["arm"] != "reference":
            ends.append((points[max(points)], f"{exponent:.2f}", style.color))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    label_ends(axes, ends, fontsize=7.5)
    token_axis(axes, powers_apart=1 if len({r["length"] for r in found}) <= 7 else 2)
    axes.set_title(title[0].upper() + title[1:])
    axes.set_xlabel("tokens")
    axes.set_ylabel(f"time ({'CPU' if found[0]['clock'] == 'cpu' else 'wall'})")
    axes.tick_params(colors=GUIDE, labelcolor="#333333")


def _short(value: float) -> str:
    number, unit = seconds(value).split(" ")
    return f"{float(number):g} {unit}"


def _legend(canvas: "Canvas", lines: Sequence[Sequence[Record]]) -> None:
    from matplotlib.lines import Line2D

    handles = {}
    for line in lines:
        style = _style(line)
        name = label({**line[0], "budget": None}) if line[0]["bench"] == "bank" else label(line[0])
        handles.setdefault(name, Line2D([], [], marker=style.marker, label=name, **style.line))
    columns = max(1, min(len(handles), int(canvas.get_size_inches()[0] / 2.1)))
    legend = canvas.legend(
        handles=list(handles.values()),
        loc=BELOW,
        ncols=columns,
        title=fill(_CAPTION, round(15 * canvas.get_size_inches()[0])),
        title_fontsize=7.5,
    )
    legend.get_title().set_color(GUIDE)
