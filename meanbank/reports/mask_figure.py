"""The picture of who sees what: a panel for each kind of layer, queries down, tokens across."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from meanbank.reports.canvas import form_legend, png_file, write_csv
from meanbank.reports.palette import FORM_COLORS
from meanbank.reports.wording import listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL = (3.5, 3.9)  # inches
_PANELS_A_ROW = 3
_LABELS = {
    "exact": "exactly",
    "sink": "as the sink",
    "own row": "in a row of its own",
    "shared row": "in a row with others",
    "matrix": "through a matrix",
    "not seen": "not at all",
    "later": "later than the query",
}


@dataclass(frozen=True, kw_only=True)
class MaskPanel:
    """What one kind of layer sees.

    layers: their numbers; memory: in words; forms: (T, T), how query i sees token j, as indices of
    the names that `draw_mask` is given.
    """

    layers: tuple[int, ...]
    memory: str
    forms: np.ndarray

    @property
    def title(self) -> str:
        """`layers 0-2, 5`."""
        return f"layer{'s' if len(self.layers) > 1 else ''} {_runs(self.layers)}"


def draw_mask(panels: Sequence[MaskPanel], names: Sequence[str], path: Path) -> str:
    """Save the picture as a PNG file; returns it in words.

    names: of the forms, keys of `FORM_COLORS`.
    """
    from matplotlib.colors import ListedColormap

    columns = min(_PANELS_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    size = (max(5.6, _PANEL[0] * columns + 0.2), _PANEL[1] * lines + 0.7)
    colors = ListedColormap([FORM_COLORS[name] for name in names])
    shown = {names[form] for panel in panels for form in np.unique(panel.forms)}
    with png_file(path, size) as canvas:
        grid: Any = canvas.subplots(lines, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            axes.imshow(
                panel.forms, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5, interpolation="nearest"
            )
            _dress(axes, panel)
        used = [name for name in _LABELS if name in shown and name != "later"]
        form_legend(canvas, used, [_LABELS[name] for name in used])
    return " ".join(_in_words(panel, names) for panel in panels)


def _dress(axes: "Axes", panel: MaskPanel) -> None:
    from matplotlib.ticker import MaxNLocator

    settings = fill(panel.memory, 46, max_lines=3, placeholder=" ...")
    axes.set_title(panel.title + "\n" * len(settings.splitlines()), fontsize=10)
    axes.text(
        0,
        1.02,
        settings,
        transform=axes.transAxes,
        fontsize=8,
        color="#555555",
        verticalalignment="bottom",
    )
    axes.set_xlabel("token")
    axes.set_ylabel("query")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)  # they would hide the sink
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 8, 10]))


def _in_words(panel: MaskPanel, names: Sequence[str]) -> str:
    """What the last query sees."""
    last = panel.forms[-1]
    counts = [
        f"{int((last == form).sum()):,} {_LABELS[name]}"
        for form, name in enumerate(names)
        if name != "later" and (last == form).any()
    ]
    return (
        f"{panel.title.capitalize()} ({panel.memory}): of {len(last):,} tokens, the last query "
        f"sees {listed(counts)}."
    )


def write_mask(panels: Sequence[MaskPanel], names: Sequence[str], path: Path) -> None:
    """The picture as numbers: a line for each run of neighbouring tokens that a query sees alike.

    layers, memory, query, first, last (token of the run), form; later tokens are left out.
    """
    columns = ("layers", "memory", "query", "first", "last", "form")
    write_csv(path, columns, (line for panel in panels for line in _lines(panel, names)))


def _lines(panel: MaskPanel, names: Sequence[str]) -> Iterator[tuple]:
    layers = _runs(panel.layers)
    for query, row in enumerate(panel.forms):
        starts = np.flatnonzero(np.diff(row[: query + 1], prepend=-1))
        stops = [*starts[1:], query + 1]
        for start, stop in zip(starts, stops, strict=True):
            yield layers, panel.memory, query, int(start), int(stop) - 1, names[row[start]]


def _runs(numbers: Sequence[int]) -> str:
    """`0-2, 5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
