"""Figures of layers over training: how memories are used, and what was learned of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from meanbank.reports.curves import Points
from meanbank.reports.files import as_count, as_number, as_object
from meanbank.reports.palette import Style, ramp
from meanbank.reports.run.curves import thinned
from meanbank.reports.run.loading import Run
from meanbank.reports.study.figure import Figure, legend_height, style_legend
from meanbank.reports.wording import measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Read = Callable[[Mapping[str, Any]], Iterator[tuple[str, list[float]]]]  # of a layer, by panel

_STATISTICS = {
    "rows": "rows",
    "effective_rows": "effective rows",
    "dead_rows": "rows of a single token",
    "merged": "tokens merged",
    "append_similarity": "similarity of opened rows",
    "merge_similarity": "similarity of merged tokens",
}
_COLUMNS, _PANEL = 2, 1.55  # inches
_NAMED, _BANDED = 8, 4  # layers in a legend; layers up to which bands can be told apart
_MARKED, _POINTS = 24, 60  # points of a line that have markers; points of any line


@dataclass(frozen=True, kw_only=True)
class LayerPoint:
    """A figure of one layer after `step` steps; `low` and `high` are over its heads.

    Of a long run, the means of shares of its steps.
    """

    panel: str
    layer: int
    step: int
    value: float
    low: float | None = None
    high: float | None = None


def layer_figures(run: Run) -> Iterator[Figure]:
    """Those that the run has numbers for."""
    yield from _figure(
        "memory-statistics",
        "How the memories are used",
        "After one held-out document, a line a layer, light at the bottom of the model and dark at "
        "the top; means over heads. Effective rows are the exponential of the entropy of the rows' "
        "shares of tokens. Similarities are cosines: of a token that opened a row with the row "
        "most alike, and of a merged token with its row.",
        _points(run, _statistics),
    )
    yield from _figure(
        "learned",
        "Temperatures and coefficients",
        "What layers have learned beside their matrices, a line a layer. Temperatures scale the "
        "queries: means over heads, of few layers with bands from the lowest head to the highest. "
        "Coefficients scale the parts of the values (gamma of a bank); times the root mean square "
        "of its table, they are what reaches the layer.",
        _points(run, _learned),
    )


def _statistics(layer: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    for name, label in _STATISTICS.items():
        value = as_number(layer.get(name))
        if value is not None:
            yield label, [value]


def _learned(layer: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    for name, heads in as_object(layer.get("temperatures")).items():
        values = heads if isinstance(heads, list) else [heads]
        found = [value for head in values if (value := as_number(head)) is not None]
        if found:
            yield name if name == "temperature" else f"{name} temperature", found
    for key, said in (("coefficients", "coefficient"), ("products", "coefficient × table")):
        for name, number in as_object(layer.get(key)).items():
            value = as_number(number)
            if value is not None:
                yield f"{name}: {said}", [value]


def _points(run: Run, read: Read) -> list[LayerPoint]:
    """By panel, layer and step; numbers that are not finite are left out."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for step, layers in run.statistics.items():
        for layer in layers:
            number = as_count(layer.get("layer"))
            for panel, values in read(layer):
                if number is not None and all(map(math.isfinite, values)):
                    found.setdefault((panel, number), {})[step] = values
    panels = list(dict.fromkeys(panel for panel, _ in found))
    order = sorted(found, key=lambda key: (panels.index(key[0]), key[1]))
    return [point for key in order for point in _line(*key, found[key])]


def _line(panel: str, layer: int, heads: Mapping[int, list[float]]) -> Iterator[LayerPoint]:
    """heads: the values of each by step."""

    def line(of: Callable[[list[float]], float]) -> Points:
        return thinned([(step, of(values)) for step, values in heads.items()], _POINTS)

    several = all(len(values) > 1 for values in heads.values())
    for (step, value), (_, low), (_, high) in zip(line(fmean), line(min), line(max), strict=True):
        bounds = {"low": low, "high": high} if several else {}
        yield LayerPoint(panel=panel, layer=layer, step=step, value=value, **bounds)


def _figure(name: str, title: str, caption: str, points: Sequence[LayerPoint]) -> Iterator[Figure]:
    if not points:
        return
    panels = _by(points, "panel")
    layers = sorted({point.layer for point in points})
    colors = dict(zip(layers, ramp(len(layers)), strict=True))
    named = _spread(layers)
    lines = -(-len(panels) // _COLUMNS)

    def draw(canvas: "Canvas") -> None:
        grid: Any = canvas.subplots(lines, _COLUMNS, squeeze=False, sharex=True)
        for axes, (panel, shown) in zip(grid.flat, panels.items(), strict=False):
            _draw(axes, shown, colors)
            axes.set_title(panel, fontsize=8.5)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid.flat[max(0, len(panels) - _COLUMNS) : len(panels)]:
            axes.tick_params(labelbottom=True)
        for axes in grid[-1]:
            axes.set_xlabel("steps")
        looks = [(f"layer {n}", Style(color=colors[n], marker="o")) for n in named]
        style_legend(canvas, looks)

    said = "; ".join(
        f"{panel} {measured(min(last))} to {measured(max(last))}"
        for panel, shown in panels.items()
        if (last := [line[-1].value for line in _by(shown, "layer").values()])
    )
    yield Figure(
        name=name,
        title=title,
        caption=caption,
        alternative=f"{title}, {len(panels)} panels over the steps of training, a line for "
        f"each of {len(layers)} layers. At last, lowest to highest layer: {said}.",
        height=_PANEL * lines + 0.35 + legend_height([f"layer {n}" for n in named]),
        points=points,
        draw=draw,
    )


def _draw(axes: "Axes", points: Iterable[LayerPoint], colors: Mapping[int, str]) -> None:
    few = len(colors) <= _BANDED
    for layer, line in _by(points, "layer").items():
        steps, color = [point.step for point in line], colors[layer]
        bounds = [(p.low, p.high) for p in line if p.low is not None and p.high is not None]
        if few and bounds:
            low, high = zip(*bounds, strict=True)
            axes.fill_between(steps, low, high, color=color, alpha=0.14, linewidth=0)
        marker = "o" if few and len(line) <= _MARKED else ""
        look = {"marker": marker, "markersize": 3, "linewidth": 1.8 if few else 1.1}
        axes.plot(steps, [point.value for point in line], color=color, **look)


def _by(points: Iterable[LayerPoint], field: str) -> dict[Any, list[LayerPoint]]:
    found: dict[Any, list[LayerPoint]] = {}
    for point in points:
        found.setdefault(getattr(point, field), []).append(point)
    return found


def _spread(layers: Sequence[int]) -> list[int]:
    """At most `_NAMED` of them, the first and the last included."""
    if len(layers) <= _NAMED:
        return list(layers)
    return [layers[round(n * (len(layers) - 1) / (_NAMED - 1))] for n in range(_NAMED)]
