"""The figure of what a bank saves, against both denominators."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meanbank.reports.axes import token_axis
from meanbank.reports.files import as_count, as_number, as_objects
from meanbank.reports.palette import variant
from meanbank.reports.study.figure import (
    Figure,
    Looks,
    figure_name,
    legend_height,
    stacked,
    style_legend,
)
from meanbank.reports.study.results import Arm, Group
from meanbank.reports.wording import length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_OF = {"of_values": "of the cache of values", "of_keys_and_values": "of keys and values"}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Share of the memory of `batch` sequences that is saved, the tables taken off."""

    arm: str
    of: str
    tokens: int
    batch: int | None
    share: float

    @property
    def setting(self) -> tuple[str, int | None]:
        """What a line is of."""
        return self.arm, self.batch


def memory_saved(group: Group, looks: Looks) -> Iterator[Figure]:
    """A panel a denominator, a line an arm and setting."""
    for title in group.titles("memory"):
        points = [point for arm in group.arms for point in _saved(arm, title)]
        if not points:
            continue
        settings = list(dict.fromkeys(point.setting for point in points))
        styles = {
            setting: variant(looks[setting[0]].color, index)
            for index, setting in enumerate(settings)
        }
        labels = [_label(group, setting) for setting in settings]

        def draw(canvas: "Canvas", points=points, styles=styles, labels=labels) -> None:
            for (of, said), axes in zip(_OF.items(), stacked(canvas, len(_OF)), strict=True):
                _draw(axes, [point for point in points if point.of == of], styles)
                axes.set_title(said)
            style_legend(canvas, list(zip(labels, styles.values(), strict=True)))

        yield Figure(
            name=figure_name(group, title, "saved"),
            title="Memory saved by a bank",
            caption="What a bank saves, the bytes of its tables taken off, as a share of the cache "
            "of values (above) and of the whole cache of keys and values (below). Below zero, the "
            "tables cost more than they save.",
            alternative=_words(points, settings, labels),
            height=4.6 + legend_height(labels),
            points=points,
            draw=draw,
        )


def _saved(arm: Arm, title: str) -> Iterator[Saved]:
    for _, evaluation in arm.evaluations(title)[:1]:  # the same for every seed
        for row in as_objects(evaluation.results.get("saved")):
            tokens = as_count(row.get("tokens"))
            for of in _OF:
                share = as_number(row.get(of))
                if tokens and share is not None and math.isfinite(share):
                    yield Saved(
                        arm=arm.name,
                        of=of,
                        tokens=tokens,
                        batch=as_count(row.get("batch")),
                        share=share,
                    )


def _label(group: Group, setting: tuple[str, int | None]) -> str:
    arm, batch = setting
    return group.labels[arm] if batch is None else f"{group.labels[arm]}, batch {batch}"


def _draw(axes: "Axes", points: list[Saved], styles: dict) -> None:
    from matplotlib.ticker import PercentFormatter

    for setting, style in styles.items():
        line = [point for point in points if point.setting == setting]
        x, y = [point.tokens for point in line], [point.share for point in line]
        axes.plot(x, y, marker=style.marker, label=str(setting), **style.line)
    token_axis(axes, powers_apart=1 if len({point.tokens for point in points}) <= 7 else 2)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_xlabel("tokens read")
    axes.set_ylabel("memory saved")


def _words(points: list[Saved], settings: list, labels: list[str]) -> str:
    parts = []
    for setting, label in zip(settings, labels, strict=True):
        for of, said in _OF.items():
            line = [point for point in points if point.setting == setting and point.of == of]
            if line:
                last = line[-1]
                share = f"{100 * last.share:.0f} % {said} at {length(last.tokens)} tokens"
                parts.append(f"{label}: {share}")
    return f"Memory saved against tokens read. Last points: {'; '.join(parts)}."
