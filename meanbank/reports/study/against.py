"""Arms held against another one, and the figure of their bits per byte.

Differences are within a seed, so what seeds have in common takes no part in their intervals.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.palette import COLORS, GUIDE
from meanbank.reports.study.figure import Figure, Looks, figure_name
from meanbank.reports.study.results import Arm, Group
from meanbank.reports.study.statistics import estimate
from meanbank.reports.wording import decimal, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

LETTERS = 30  # of a line of a label
_LINE, _ROOM = 0.17, 0.1  # inches: of a line of a label, and around all lines of it

BySeed = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A score of an arm and, where it is held against another one, its difference from it.

    mean: over `seeds` seeds. The difference is a mean over seeds that both have, with its 95 % t
    interval, and the differences of the seeds in order.
    """

    score: str
    arm: str
    mean: float
    seeds: int
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    of_seeds: tuple[float, ...] = ()

    @property
    def is_apart(self) -> bool:
        """Whether the interval of the difference is without 0."""
        low, high = self.difference_low, self.difference_high
        return low is not None and high is not None and not low <= 0 <= high


def held_against(score: str, arm: str, values: BySeed, against: BySeed) -> Held:
    """An arm's scores and their differences from `against`, which is empty for what others are
    held against."""
    mean = estimate([*values.values()])
    assert mean is not None  # only what was measured is shown
    apart = [values[seed] - against[seed] for seed in sorted(values) if seed in against]
    over = estimate(apart)
    half = None if over is None else over.half_width
    return Held(
        score=score,
        arm=arm,
        mean=mean.mean,
        seeds=mean.count,
        difference=None if over is None else over.mean,
        difference_low=None if over is None or half is None else over.mean - half,
        difference_high=None if over is None or half is None else over.mean + half,
        of_seeds=tuple(apart),
    )


def height_of(labels: Iterable[str]) -> float:
    """Inches that rows with these labels take."""
    return sum(_ROOM + _LINE * (1 + label.count("\n")) for label in labels)


def places_of(labels: Sequence[str]) -> list[float]:
    """The middles of rows with these labels, from above, in inches."""
    middles, top = [], 0.0
    for label in labels:
        middles.append(top + height_of([label]) / 2)
        top += height_of([label])
    return middles


def bits_per_byte(group: Group, looks: Looks) -> Iterator[Figure]:
    """The differences of arms from the reference in bits per byte, a panel an evaluation."""
    arms = [arm for arm in group.with_reference if arm.is_trained_here]
    if group.reference is None or len(arms) < 2:
        return
    panels = {title: _held_bits(arms, title, group.reference) for title in group.titles("bpb")}
    panels = {title: held for title, held in panels.items() if len(held) > 1}
    if not panels:
        return
    labels = {name: fill(label, LETTERS) for name, label in group.labels.items()}
    heights = {title: height_of(labels[one.arm] for one in held) for title, held in panels.items()}

    def draw(canvas: "Canvas") -> None:
        grid: Any = canvas.subplots(
            len(panels), 1, squeeze=False, height_ratios=list(heights.values())
        )
        for axes, (title, held) in zip(grid[:, 0], panels.items(), strict=True):
            _draw_differences(axes, held, labels)
            if len(panels) > 1:
                axes.set_title(title)
        grid[-1, 0].set_xlabel("difference in bits per byte, less is better")

    against = group.reference.label
    yield Figure(
        name=figure_name(group, "bpb"),
        title=f"Bits per byte against {against}",
        caption=f"Bits per byte of held-out text less those of {against} (the dashed line) with "
        "the same seed: dots are seeds, the diamond is their mean, the bar its 95 % t interval; on "
        f"the right the mean of the bits per byte themselves. {_extremes(group, panels)}",
        alternative=f"A strip an arm. {_differences_said(group, panels)}.",
        height=0.7 + sum(heights.values()) + (0.3 * len(panels) if len(panels) > 1 else 0),
        points=[one for held in panels.values() for one in held],
        draw=draw,
        columns={"mean": "bits_per_byte"},
    )


def _held_bits(arms: Sequence[Arm], title: str, reference: Arm) -> list[Held]:
    against = _finite(reference.values(title))
    found = ((arm, _finite(arm.values(title))) for arm in arms)
    return [
        held_against(title, arm.name, values, {} if arm == reference else against)
        for arm, values in found
        if values
    ]


def _finite(values: BySeed) -> BySeed:
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _draw_differences(axes: "Axes", held: Sequence[Held], labels: Mapping[str, str]) -> None:
    rows = [labels[one.arm] for one in held]
    places = places_of(rows)
    axes.axvline(0, color=GUIDE, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    look = {"linestyle": "none", "markeredgewidth": 0}
    for place, one in zip(places, held, strict=True):
        axes.plot(
            one.of_seeds,
            [place] * len(one.of_seeds),
            marker="o",
            color=COLORS[1],
            alpha=0.45,
            **look,
        )
        if one.difference is not None:
            axes.plot([one.difference], [place], marker="D", color="#222222", **look)
        if one.difference_low is not None and one.difference_high is not None:
            ends = [one.difference_low, one.difference_high]
            axes.plot(ends, [place] * 2, color="#222222", linewidth=1.4, solid_capstyle="butt")
        axes.text(
            1.02,
            place,
            decimal(one.mean),
            transform=axes.get_yaxis_transform(),
            va="center",
            size=8,
        )
    axes.set_yticks(places, rows)
    axes.set_ylim(height_of(rows), 0)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.locator_params(axis="x", nbins=5)


def _extremes(group: Group, panels: Mapping[str, Sequence[Held]]) -> str:
    """Which arms have the fewest and the most bits."""
    said = []
    for title, held in panels.items():
        least, most = min(held, key=lambda one: one.mean), max(held, key=lambda one: one.mean)
        where = f" ({title})" if len(panels) > 1 else ""
        said.append(
            f"The best{where} is {group.labels[least.arm]} with {decimal(least.mean)}, the worst "
            f"{group.labels[most.arm]} with {decimal(most.mean)}."
        )
    return " ".join(said)


def _differences_said(group: Group, panels: Mapping[str, Sequence[Held]]) -> str:
    return "; ".join(
        f"{group.labels[one.arm]}{f' ({title})' if len(panels) > 1 else ''}: "
        f"{decimal(one.mean)}{_apart_said(one)}"
        for title, held in panels.items()
        for one in held
    )


def _apart_said(one: Held) -> str:
    if one.difference is None:
        return ""
    if one.difference_low is None or one.difference_high is None:
        return f", {signed(one.difference)} apart"
    between = f"{signed(one.difference_low)} to {signed(one.difference_high)}"
    return f", {signed(one.difference)} apart ({between})"
