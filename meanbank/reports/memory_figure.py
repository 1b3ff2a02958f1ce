"""The picture of where tokens went: strips of positions, and rows by their age."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meanbank.reports.canvas import form_legend, png_file, write_csv
from meanbank.reports.palette import FORM_COLORS
from meanbank.reports.wording import listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 9.0  # inches
_STRIP, _STRIPS, _AGES = 0.2, 12.0, 2.5  # of one strip, of all at most, of a line of rows
_NAMED = 60  # strips up to which each head has a label
_PANELS_A_ROW = 3
_LABELS = {
    "sink": "sink",
    "own row": "opened a row",
    "merged": "merged into a row",
    "window": "still exact",
}


@dataclass(frozen=True, kw_only=True)
class MemoryPanel:
    """Where the tokens of one layer went.

    memory: its type; heads: numbers of its key/value heads; fates: (heads, T), indices of the names
    that `draw_token_fates` is given; rows: (heads, T), the row of each token, -1 without one.
    """

    layer: int
    memory: str
    heads: tuple[int, ...]
    fates: np.ndarray
    rows: np.ndarray


def draw_token_fates(panels: Sequence[MemoryPanel], names: Sequence[str], path: Path) -> str:
    """Save the picture as a PNG file; returns it in words.

    names: of the fates, keys of `FORM_COLORS`.
    """
    strips = sum(len(panel.heads) for panel in panels)
    columns = min(_PANELS_A_ROW, len(panels))
    lines = -(-len(panels) // columns)
    above = max(1.0, min(_STRIP * strips, _STRIPS) + 0.7)
    with png_file(path, (_WIDTH, above + _AGES * lines + 0.4)) as canvas:
        halves: Any = canvas.subfigures(2, 1, height_ratios=(above, _AGES * lines))
        top, bottom = halves
        _draw_strips(top.subplots(), panels, names)
        grid: Any = bottom.subplots(lines, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw_rows(axes, panel, names)
        for axes in grid[:, 0]:
            axes.set_ylabel("tokens in the row")
        form_legend(canvas, names, [_LABELS[name] for name in names])
    return " ".join(_in_words(panel, names) for panel in panels)


def _draw_strips(axes: "Axes", panels: Sequence[MemoryPanel], names: Sequence[str]) -> None:
    """A line for each layer and head, coloured by what became of the token there."""
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([FORM_COLORS[name] for name in names])
    strips = np.concatenate([panel.fates for panel in panels])
    axes.imshow(
        strips,
        cmap=colors,
        vmin=-0.5,
        vmax=len(names) - 0.5,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, strips.shape[1] - 0.5, len(strips) - 0.5, -0.5),
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    places, labels, at = [], [], 0
    for panel in panels:
        heads = len(panel.heads)
        if len(strips) <= _NAMED:
            places += range(at, at + heads)
            labels += [f"layer {panel.layer}, head {head}" for head in panel.heads]
            for line in range(at + 1, at + heads):
                axes.axhline(line - 0.5, color="white", linewidth=0.8)
        else:
            places.append(at + (heads - 1) / 2)
            labels.append(f"layer {panel.layer}")
        if at:
            axes.axhline(at - 0.5, color="white", linewidth=2.5)
        at += heads
    axes.set_yticks(places, labels, fontsize=7.5)
    axes.set_title("What became of each token")
    axes.set_xlabel("position in the text")


def _draw_rows(axes: "Axes", panel: MemoryPanel, names: Sequence[str]) -> None:
    """A point for each row: where the token that opened it stands, and how many it holds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    sink = names.index("sink")
    for fates, rows in zip(panel.fates, panel.rows, strict=True):
        merged = fates == names.index("merged")
        birth = np.flatnonzero((rows >= 0) & ~merged)
        sizes = np.bincount(rows[rows >= 0])[rows[birth]]
        kept = fates[birth] == sink
        for which, name in ((~kept, "own row"), (kept, "sink")):
            axes.plot(
                birth[which],
                sizes[which],
                linestyle="none",
                marker="o",
                markersize=3.5,
                color=FORM_COLORS[name],
                markeredgecolor="#333333",
                markeredgewidth=0.3,
                alpha=0.75,
            )
    axes.set_title(f"Rows of layer {panel.layer} ({panel.memory})")
    axes.set_xlabel("position where the row was opened")
    axes.set_xlim(-0.02 * panel.rows.shape[1], 1.02 * panel.rows.shape[1])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))


def _in_words(panel: MemoryPanel, names: Sequence[str]) -> str:
    heads, tokens = panel.fates.shape
    shares = [
        f"{(panel.fates == fate).sum() / heads:,.0f} {_LABELS[name]}"
        for fate, name in enumerate(names)
        if (panel.fates == fate).any()
    ]
    sizes = np.concatenate([np.bincount(rows[rows >= 0]) for rows in panel.rows])
    rows = "no rows yet"
    if len(sizes):
        alone = (sizes == 1).mean()
        rows = f"the largest row has {sizes.max():,} tokens, {alone:.0%} of rows have one"
    told = f"of {tokens:,} tokens a head, {listed(shares)}"
    return f"Layer {panel.layer} ({panel.memory}): {told}; {rows}."


def write_token_fates(
    panels: Sequence[MemoryPanel], names: Sequence[str], texts: Sequence[str], path: Path
) -> None:
    """A line for each layer, head and token: layer, head, position, token, row, fate.

    texts: of each token, written as in JSON, so that line breaks stay visible; no row is empty.
    """
    columns = ("layer", "head", "position", "token", "row", "fate")
    write_csv(path, columns, (line for panel in panels for line in _lines(panel, names, texts)))


def _lines(panel: MemoryPanel, names: Sequence[str], texts: Sequence[str]) -> Iterator[tuple]:
    shown = [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts]
    for head, fates, rows in zip(panel.heads, panel.fates, panel.rows, strict=True):
        for position, (fate, row) in enumerate(zip(fates, rows, strict=True)):
            where = "" if row < 0 else int(row)
            yield panel.layer, head, position, shown[position], where, names[fate]
