"""Figures that hold arms against their group's reference: bits per byte, accuracies, changes.

Differences are within a seed, so what seeds have in common takes no part in their intervals.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.files import as_count, as_number, as_object, as_objects
from meanbank.reports.palette import COLORS, GUIDE
from meanbank.reports.study.figure import MOST_ARMS, Figure, Looks, figure_name
from meanbank.reports.study.results import Arm, Evaluation, Group
from meanbank.reports.study.statistics import estimate
from meanbank.reports.wording import decimal, length, signed, two_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_LETTERS = 30  # of a line of a label
_LINE, _ROOM = 0.17, 0.1  # inches: of a line of a label, and around all lines of it
_FULL_COLOR = 0.3  # a difference of accuracies that is drawn in the strongest colour
_BETTER_IS_BLUE = "RdBu"  # the same to readers with any colour vision

BySeed = Mapping[int, float]
Setting = tuple[int, int]  # length in tokens, pairs


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
    of_seeds: str = ""

    @property
    def is_apart(self) -> bool:
        """Whether the interval of the difference is without 0."""
        low, high = self.difference_low, self.difference_high
        return low is not None and high is not None and not low <= 0 <= high


def bits_per_byte(group: Group, looks: Looks) -> Iterator[Figure]:
    """The differences of arms from the reference in bits per byte, a panel an evaluation."""
    arms = [arm for arm in group.with_reference if arm.is_trained_here]
    if group.reference is None or len(arms) < 2:
        return
    panels = {title: _held_bits(arms, title, group.reference) for title in group.titles("bpb")}
    panels = {title: held for title, held in panels.items() if len(held) > 1}
    if not panels:
        return
    labels = {name: fill(label, _LETTERS) for name, label in group.labels.items()}
    heights = {title: _height(labels[one.arm] for one in held) for title, held in panels.items()}

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
        _held(title, arm.name, values, {} if arm == reference else against)
        for arm, values in found
        if values
    ]


def _finite(values: BySeed) -> BySeed:
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def accuracy_of_many(group: Group, looks: Looks) -> Iterator[Figure]:
    """Accuracies by length and pairs of more arms than a figure of points tells apart."""
    if group.reference is None or len(group.with_reference) <= MOST_ARMS:
        return
    for task in ("recall", "mqar"):
        for title in group.titles(task):
            found = {arm.name: _accuracies(arm.evaluations(title)) for arm in group.with_reference}
            asked = {setting for arm in group.arms for setting in found[arm.name]}
            against = {s: v for s, v in found[group.reference.name].items() if s in asked}
            found[group.reference.name] = against
            held = [
                one
                for name, values in found.items()
                for one in _held_accuracies(
                    name, values, {} if name == group.reference.name else against
                )
            ]
            if held:
                yield _accuracy_map(
                    held,
                    labels=group.labels,
                    against=group.reference.label,
                    name=figure_name(group, title),
                    title=f"Accuracy by length and pairs: {title}",
                )


def changes(group: Group, looks: Looks) -> Iterator[Figure]:
    """Accuracies of arms whose memories were changed after training, against the same arms."""
    held, labels = [], {}
    for arm in group.arms:
        changed = {
            title: found
            for title in group.titles("changed")
            if (found := _accuracies(arm.evaluations(title)))
        }
        if not changed:
            continue
        asked = {setting for found in changed.values() for setting in found}
        as_trained = _as_trained(group, arm, asked)
        labels[arm.name] = arm.label
        held += _held_accuracies(arm.name, as_trained, {})
        for title, found in changed.items():
            name = f"{arm.name} {title}"
            labels[name] = f"    … {title.removeprefix('as-')}"
            held += _held_accuracies(name, found, as_trained)
    if held:
        yield _accuracy_map(
            held,
            labels=labels,
            against="the same models unchanged",
            name=figure_name(group, "changed"),
            title="Memories changed after training",
        )


def _as_trained(group: Group, arm: Arm, settings: Iterable[Setting]) -> dict[Setting, BySeed]:
    """The accuracies of an arm as it was trained at these settings."""
    found: dict[Setting, BySeed] = {}
    for title in group.titles("recall"):
        found = {**_accuracies(arm.evaluations(title)), **found}
    return {setting: found[setting] for setting in settings if setting in found}


def _accuracies(evaluations: Sequence[tuple[int, Evaluation]]) -> dict[Setting, dict[int, float]]:
    """Accuracies by setting and seed."""
    found: dict[Setting, dict[int, float]] = {}
    for seed, evaluation in evaluations:
        if as_object(evaluation.settings.get("evaluation")).get("type", "recall") != "recall":
            continue
        for cell in as_objects(evaluation.results.get("grid")):
            tokens, pairs = as_count(cell.get("length")), as_count(cell.get("pairs"))
            value = as_number(cell.get("accuracy"))
            if tokens is None or pairs is None or value is None:
                continue
            if math.isfinite(value):
                found.setdefault((tokens, pairs), {})[seed] = value
    # By pairs first: each length trend stands together.
    return {setting: found[setting] for setting in sorted(found, key=lambda s: (s[1], s[0]))}


def _held_accuracies(
    name: str, found: Mapping[Setting, BySeed], against: Mapping[Setting, BySeed]
) -> list[Held]:
    return [
        _held(f"{tokens}/{pairs}", name, values, against.get((tokens, pairs), {}))
        for (tokens, pairs), values in found.items()
    ]


def _held(score: str, arm: str, values: BySeed, against: BySeed) -> Held:
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
        of_seeds=" ".join(f"{each:.6g}" for each in apart),
    )


def _height(labels: Iterable[str]) -> float:
    """Inches that rows with these labels take."""
    return sum(_ROOM + _LINE * (1 + label.count("\n")) for label in labels)


def _places(labels: Sequence[str]) -> list[float]:
    """The middles of rows with these labels, from above, in inches."""
    middles, top = [], 0.0
    for label in labels:
        middles.append(top + _height([label]) / 2)
        top += _height([label])
    return middles


def _draw_differences(axes: "Axes", held: Sequence[Held], labels: Mapping[str, str]) -> None:
    rows = [labels[one.arm] for one in held]
    places = _places(rows)
    axes.axvline(0, color=GUIDE, linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    look = {"linestyle": "none", "markeredgewidth": 0}
    for place, one in zip(places, held, strict=True):
        seeds = [float(each) for each in one.of_seeds.split()]
        axes.plot(seeds, [place] * len(seeds), marker="o", color=COLORS[1], alpha=0.45, **look)
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
    axes.set_ylim(_height(rows), 0)
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


def _accuracy_map(
    held: Sequence[Held], *, labels: Mapping[str, str], against: str, name: str, title: str
) -> Figure:
    arms = list(dict.fromkeys(one.arm for one in held))
    settings = sorted({one.score for one in held}, key=lambda s: [*map(int, s.split("/"))][::-1])
    rows = {arm: _wrapped(labels[arm]) for arm in arms}

    def draw(canvas: "Canvas") -> None:
        _draw_map(canvas.subplots(), held, rows, settings)

    said = (
        f"{labels[arm].strip(' …')}: "
        + ", ".join(f"{decimal(one.mean, 2)} at {one.score}" for one in held if one.arm == arm)
        for arm in arms
    )
    return Figure(
        name=name,
        title=title,
        caption=f"Accuracy, mean over seeds, by tokens in the sequence / pairs to recall. Blue is "
        f"better and red worse than {against}, in the strongest colour from {_FULL_COLOR:g} on; "
        "bold where the 95 % t interval of the difference within a seed is without 0.",
        alternative=f"A table in colours, accuracies by tokens/pairs. {'; '.join(said)}.",
        height=0.55 + _height(rows.values()),
        points=held,
        draw=draw,
        columns={"score": "setting", "mean": "accuracy"},
    )


def _wrapped(label: str) -> str:
    indent = label[: len(label) - len(label.lstrip(" …"))]
    return fill(label, _LETTERS, subsequent_indent=indent)


def _draw_map(
    axes: "Axes", held: Sequence[Held], rows: Mapping[str, str], settings: Sequence[str]
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colors = colormaps[_BETTER_IS_BLUE]
    places = dict(zip(rows, _places([*rows.values()]), strict=True))
    for one in held:
        x, middle, tall = settings.index(one.score), places[one.arm], _height([rows[one.arm]])
        share = max(-1.0, min(1.0, (one.difference or 0.0) / _FULL_COLOR))
        corner = (x - 0.5, middle - tall / 2)
        field = colors(0.5 + 0.5 * share)
        axes.add_patch(Rectangle(corner, 1, tall, facecolor=field, edgecolor="white"))
        axes.text(
            x,
            middle,
            two_digits(one.mean),
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if one.is_apart else "normal",
            color="white" if abs(share) > 0.7 else "black",
        )
    axes.set_xlim(-0.5, len(settings) - 0.5)
    axes.set_ylim(_height(rows.values()), 0)
    named = [f"{length(int(n))}\n/{pairs}" for n, pairs in (s.split("/") for s in settings)]
    axes.set_xticks(range(len(settings)), named)
    axes.set_yticks([*places.values()], [*rows.values()])
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.tick_params(length=0, labelsize=8)
    axes.tick_params(axis="y", pad=_label_width(rows.values()))
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _label_width(labels: Iterable[str]) -> float:
    """Points that the longest line of labels takes, about."""
    return 4.6 * max(len(line) for label in labels for line in label.split("\n"))
