"""Figures of accuracies by length and pairs: of few arms, of many, and of changed memories."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.axes import mark_level
from meanbank.reports.files import as_count, as_number, as_objects
from meanbank.reports.study.against import (
    LETTERS,
    BySeed,
    Held,
    height_of,
    held_against,
    places_of,
)
from meanbank.reports.study.figure import (
    MOST_ARMS,
    Figure,
    Looks,
    figure_name,
    legend,
    legend_height,
)
from meanbank.reports.study.results import Arm, Group
from meanbank.reports.wording import decimal, length, two_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Setting = tuple[int, int]  # length in tokens, pairs
BySetting = Mapping[Setting, BySeed]

_GROUPS_A_LINE = 6
_FULL_COLOR = 0.3  # a difference that is drawn in the strongest colour
_BETTER_IS_BLUE = "RdBu"  # the same to readers with any colour vision


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One seed of an arm at one setting."""

    arm: str
    length: int
    pairs: int
    seed: int
    accuracy: float

    @property
    def setting(self) -> Setting:
        return self.length, self.pairs


def accuracy_by_length_and_pairs(group: Group, looks: Looks) -> Iterator[Figure]:
    """A point a seed and a bar for the mean; of more arms than can be told apart, a map."""
    for task in ("recall", "mqar"):
        for title in group.titles(task):
            points = [point for arm in group.with_reference for point in _accuracies(arm, title)]
            own = {arm.name for arm in group.arms}
            asked = {p.setting for p in points if p.arm in own}  # a reference may have more
            points = [point for point in points if point.setting in asked]
            if not points:
                continue
            if len(group.with_reference) <= MOST_ARMS or group.reference is None:
                yield _points_figure(group, title, points, looks)
                continue
            found, first = _by_arm(points), group.reference
            against = found.get(first.name, {})
            yield _map_figure(
                {
                    arm: _row(arm, of, {} if arm == first.name else against)
                    for arm, of in found.items()
                },
                labels=group.labels,
                against=first.label,
                name=figure_name(group, title),
                title=f"Accuracy by length and pairs: {title}",
            )


def changes(group: Group, looks: Looks) -> Iterator[Figure]:
    """Accuracies of arms whose memories were changed after training, against the same arms."""
    table, labels = {}, {}
    for arm in group.arms:
        changed = {title: _by_setting(_accuracies(arm, title)) for title in group.titles("changed")}
        changed = {title: found for title, found in changed.items() if found}
        if not changed:
            continue
        asked = {setting for found in changed.values() for setting in found}
        points = (point for title in group.titles("recall") for point in _accuracies(arm, title))
        unchanged = _by_setting(point for point in points if point.setting in asked)
        labels[arm.name], table[arm.name] = arm.label, _row(arm.name, unchanged, {})
        for title, found in changed.items():
            name = f"{arm.name} {title}"
            labels[name] = f"    … {title.removeprefix('as-')}"
            table[name] = _row(name, found, unchanged)
    if table:
        yield _map_figure(
            table,
            labels=labels,
            against="the same models unchanged",
            name=figure_name(group, "changed"),
            title="Memories changed after training",
        )


def _accuracies(arm: Arm, title: str) -> list[Accuracy]:
    """Those of an evaluation, seed by seed; what is no number is left out."""
    points = []
    for seed, evaluation in arm.evaluations(title):
        for cell in as_objects(evaluation.results.get("grid")):
            tokens, pairs = as_count(cell.get("length")), as_count(cell.get("pairs"))
            value = as_number(cell.get("accuracy"))
            if tokens is None or pairs is None or value is None or not math.isfinite(value):
                continue
            point = {"length": tokens, "pairs": pairs, "seed": seed, "accuracy": value}
            points.append(Accuracy(arm=arm.name, **point))
    return points


def _by_arm(points: Iterable[Accuracy]) -> dict[str, BySetting]:
    points = list(points)
    arms = dict.fromkeys(point.arm for point in points)
    return {arm: _by_setting(p for p in points if p.arm == arm) for arm in arms}


def _by_setting(points: Iterable[Accuracy]) -> BySetting:
    """Of one arm; of an accuracy that was measured twice, the first counts."""
    found: dict[Setting, dict[int, float]] = {}
    for point in points:
        found.setdefault(point.setting, {}).setdefault(point.seed, point.accuracy)
    return {setting: found[setting] for setting in _in_order(found)}


def _in_order(settings: Iterable[Setting]) -> list[Setting]:
    """By pairs first: each length trend stands together."""
    return sorted(set(settings), key=lambda setting: (setting[1], setting[0]))


def _tick(setting: Setting) -> str:
    tokens, pairs = setting
    return f"{length(tokens)}\n/{pairs}"


def _row(arm: str, found: BySetting, against: BySetting) -> dict[Setting, Held]:
    return {
        (tokens, pairs): held_against(
            f"{tokens}/{pairs}", arm, values, against.get((tokens, pairs), {})
        )
        for (tokens, pairs), values in found.items()
    }


def _chance(group: Group, title: str) -> float | None:
    found = (one for arm in group.with_reference for _, one in arm.evaluations(title))
    chances = (as_number(one.results.get("chance")) for one in found)
    return next((chance for chance in chances if chance is not None), None)


def _points_figure(group: Group, title: str, points: list[Accuracy], looks: Looks) -> Figure:
    settings, chance = _in_order(point.setting for point in points), _chance(group, title)
    lines = -(-len(settings) // _GROUPS_A_LINE)
    a_line = -(-len(settings) // lines)
    arms = list(dict.fromkeys(point.arm for point in points))

    def draw(canvas: "Canvas") -> None:
        grid: Any = canvas.subplots(lines, 1, squeeze=False, sharey=True)
        for index, axes in enumerate(grid[:, 0]):
            shown = settings[index * a_line : (index + 1) * a_line]
            _draw_accuracy(axes, points, arms, shown, looks)
            axes.set_xlim(-0.5, a_line - 0.5)
            if chance is not None:
                mark_level(axes, chance, f"chance, {decimal(chance)}")
        grid[-1, 0].set_xlabel("tokens in the sequence / pairs to recall")
        legend(canvas, arms, group.labels, looks)

    said = []
    for arm in arms:
        means = (
            f"{decimal(_mean(points, arm, s), 2)} at {s[0]}/{s[1]}"
            for s in settings
            if _mean(points, arm, s) is not None
        )
        said.append(f"{group.labels[arm]}: {', '.join(means)}")
    return Figure(
        name=figure_name(group, title),
        title=f"Accuracy by length and pairs: {title}",
        caption="Accuracy by length and number of pairs. A point is one seed, a bar the mean over "
        "seeds.",
        alternative=f"Accuracy by tokens/pairs, mean over seeds. {'; '.join(said)}.",
        height=2.3 * lines + 0.6 + legend_height(group.labels[arm] for arm in arms),
        points=points,
        draw=draw,
    )


def _mean(points: list[Accuracy], arm: str, setting: Setting) -> float | None:
    values = [p.accuracy for p in points if p.arm == arm and p.setting == setting]
    return sum(values) / len(values) if values else None


def _draw_accuracy(
    axes: "Axes", points: list[Accuracy], arms: list[str], settings: list[Setting], looks: Looks
) -> None:
    spacing = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        style = looks[arm]
        for place, setting in enumerate(settings):
            x = place + (index - (len(arms) - 1) / 2) * spacing
            mean = _mean(points, arm, setting)
            if mean is None:
                continue
            values = [p.accuracy for p in points if p.arm == arm and p.setting == setting]
            half = 0.42 * spacing
            axes.hlines(mean, x - half, x + half, color=style.color, linewidth=2.4)
            axes.plot(
                [x] * len(values),
                values,
                linestyle="none",
                marker=style.marker,
                color=style.color,
                alpha=0.55,
                markeredgewidth=0,
                clip_on=False,
            )
    for boundary in range(1, len(settings)):
        axes.axvline(boundary - 0.5, color="#e4e4e4", linewidth=0.8, zorder=0)
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(len(settings)), [*map(_tick, settings)])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("accuracy")


def _map_figure(
    table: Mapping[str, Mapping[Setting, Held]],
    *,
    labels: Mapping[str, str],
    against: str,
    name: str,
    title: str,
) -> Figure:
    """table: by arm, which has a label, and setting."""
    arms, settings = list(table), _in_order(setting for row in table.values() for setting in row)
    held = [one for row in table.values() for one in row.values()]
    rows = {arm: _wrapped(labels[arm]) for arm in arms}

    def draw(canvas: "Canvas") -> None:
        _draw_map(canvas.subplots(), table, rows, settings)

    said = (
        f"{labels[arm].strip(' …')}: "
        + ", ".join(f"{decimal(one.mean, 2)} at {one.score}" for one in table[arm].values())
        for arm in arms
    )
    return Figure(
        name=name,
        title=title,
        caption=f"Accuracy, mean over seeds, by tokens in the sequence / pairs to recall. Blue is "
        f"better and red worse than {against}, in the strongest colour from {_FULL_COLOR:g} on; "
        "bold where the 95 % t interval of the difference within a seed is without 0.",
        alternative=f"A table in colours, accuracies by tokens/pairs. {'; '.join(said)}.",
        height=0.55 + height_of(rows.values()),
        points=held,
        draw=draw,
        columns={"score": "setting", "mean": "accuracy"},
    )


def _wrapped(label: str) -> str:
    indent = label[: len(label) - len(label.lstrip(" …"))]
    return fill(label, LETTERS, subsequent_indent=indent)


def _draw_map(
    axes: "Axes",
    table: Mapping[str, Mapping[Setting, Held]],
    rows: Mapping[str, str],
    settings: Sequence[Setting],
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colors = colormaps[_BETTER_IS_BLUE]
    places = dict(zip(rows, places_of([*rows.values()]), strict=True))
    fields = ((arm, setting, one) for arm, row in table.items() for setting, one in row.items())
    for arm, setting, one in fields:
        x, middle, tall = settings.index(setting), places[arm], height_of([rows[arm]])
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
    axes.set_ylim(height_of(rows.values()), 0)
    axes.set_xticks(range(len(settings)), [*map(_tick, settings)])
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
