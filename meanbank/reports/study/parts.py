"""The figure of mixtures: how large each part of the values is by layer, and what it is worth."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.files import as_count, as_number, as_objects
from meanbank.reports.palette import Style
from meanbank.reports.study.figure import (
    Figure,
    Looks,
    by_arm,
    figure_name,
    legend_height,
    style_legend,
)
from meanbank.reports.study.results import Arm, Group
from meanbank.reports.study.statistics import mean_of
from meanbank.reports.wording import listed, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_STYLES = (
    Style(color="#0072B2", marker="o"),
    Style(color="#D55E00", marker="s", dashes=(5, 2)),
    Style(color="#009E73", marker="^", dashes=(2, 1.5)),
    Style(color="#CC79A7", marker="D", dashes=(6, 1.5, 1.5, 1.5)),
    Style(color="#222222", marker="v"),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of one layer's values, means over `seeds` seeds.

    product: coefficient x root mean square of the table. knock_out: loss without it less loss with
    it, and its lowest and highest seed.
    """

    arm: str
    layer: int
    part: str
    coefficient: float | None
    product: float | None
    knock_out: float | None
    knock_out_low: float | None
    knock_out_high: float | None
    seeds: int


def mixtures(group: Group, looks: Looks) -> Iterator[Figure]:
    """A row an arm: the sizes of the parts on the left, the loss of knocking them out right."""
    for title in group.titles("parts"):
        parts = [part for arm in group.arms for part in _parts(arm, title)]
        if not parts:
            continue
        arms = by_arm(parts)
        names = list(dict.fromkeys(part.part for part in parts))
        styles = {name: _STYLES[index % len(_STYLES)] for index, name in enumerate(names)}

        def draw(canvas: "Canvas", arms: Any = arms, styles: Any = styles) -> None:
            grid: Any = canvas.subplots(len(arms), 2, squeeze=False, sharex=True, sharey="col")
            for (arm, found), (left, right) in zip(arms.items(), grid, strict=True):
                _draw_sizes(left, found, styles)
                _draw_losses(right, found, styles)
                left.set_title(fill(group.labels[arm], 56), fontsize=9)
                right.set_title(" ")
            for axes in grid[-1]:
                axes.set_xlabel("layer")
            entries = list(styles.items())
            style_legend(canvas, entries)

        yield Figure(
            name=figure_name(group, title),
            title="What each part of the values is worth",
            caption="Left: the coefficient of each part by layer (hollow), and, where the part is "
            "a table, coefficient × root mean square of the table (filled), which is what "
            "reaches the layer. Right: how much the loss rises when the part is taken out after "
            "training; bars go from the lowest to the highest seed. Size alone is no contribution.",
            alternative=_words(group, arms, names),
            height=1.9 * len(arms) + 0.4 + legend_height(names),
            points=parts,
            draw=draw,
        )


def _parts(arm: Arm, title: str) -> Iterator[Part]:
    found: dict[tuple[int, str], list[dict[str, float | None]]] = {}
    for _, evaluation in arm.evaluations(title):
        for record in as_objects(evaluation.results.get("parts")):
            layer = as_count(record.get("layer"))
            if layer is None:
                continue
            whole, without = (as_number(record.get(f"loss_{n}")) for n in ("whole", "without"))
            values = {name: as_number(record.get(name)) for name in ("coefficient", "product")}
            values["knock_out"] = None if whole is None or without is None else without - whole
            found.setdefault((layer, str(record.get("part", ""))), []).append(values)
    for (layer, part), values in sorted(found.items()):
        losses = [one["knock_out"] for one in values]
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        yield Part(
            arm=arm.name,
            layer=layer,
            part=part,
            coefficient=mean_of([one["coefficient"] for one in values]),
            product=mean_of([one["product"] for one in values]),
            knock_out=mean_of(losses),
            knock_out_low=min(known, default=None),
            knock_out_high=max(known, default=None),
            seeds=len(values),
        )


def _draw_sizes(axes: "Axes", parts: list[Part], styles: dict[str, Style]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, style in styles.items():
        mine = [part for part in parts if part.part == name]
        hollow = {"markerfacecolor": "white", "linewidth": 0.9, "alpha": 0.8}
        for field, look in (("coefficient", hollow), ("product", {})):
            shown = [(p.layer, getattr(p, field)) for p in mine if getattr(p, field) is not None]
            if shown:
                x, y = zip(*shown, strict=True)
                axes.plot(x, y, marker=style.marker, label=f"{name}, {field}", **style.line, **look)
    axes.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_ylabel("size")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_losses(axes: "Axes", parts: list[Part], styles: dict[str, Style]) -> None:
    for index, (name, style) in enumerate(styles.items()):
        mine = [part for part in parts if part.part == name and part.knock_out is not None]
        shift = 0.12 * (index - (len(styles) - 1) / 2)
        x = [part.layer + shift for part in mine]
        losses = [
            (p.knock_out or 0.0, p.knock_out_low or 0.0, p.knock_out_high or 0.0) for p in mine
        ]
        means, low, high = zip(*losses, strict=True) if losses else ((), (), ())
        axes.vlines(x, low, high, color=style.color, linewidth=1.2, alpha=0.7)
        axes.plot(x, means, marker=style.marker, label=name, **style.line)
    axes.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_ylabel("rise of the loss (nats)")


def _words(group: Group, arms: dict[str, list[Part]], names: list[str]) -> str:
    parts = []
    for arm, found in arms.items():
        said = []
        for name in names:
            losses = [p.knock_out for p in found if p.part == name and p.knock_out is not None]
            if losses:
                said.append(f"{name} {signed(min(losses))} to {signed(max(losses))}")
        parts.append(f"{group.labels[arm]}: {listed(said)}")
    return f"Sizes of parts by layer, and the rise of the loss without each. {'; '.join(parts)}."
