"""A figure as data: the numbers that are drawn, how, and what they say to who does not see them."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.files import csv_text
from meanbank.reports.palette import BELOW, COLORS, Style
from meanbank.reports.study.results import Evaluation, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Looks = Mapping[str, Style]  # by name of the arm

WIDTH = 4.7  # inches: text stays readable where a phone shows the whole width
MOST_ARMS = len(COLORS)  # that are told apart by their looks in one picture
_MARKED = 24  # points of a line that all have a marker
_LEGEND_LETTERS = 30, 60  # of a line in two columns, in one


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that can be drawn; `points` are dataclasses, the rows of its CSV file.

    name: of its files. columns: names of the CSV's columns where the points' own say too little.
    """

    name: str
    title: str
    caption: str
    alternative: str
    height: float
    points: Sequence[Any]
    draw: "Callable[[Canvas], None]"
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> tuple[float, float]:
        """Inches."""
        return WIDTH, self.height

    def csv(self) -> str:
        """The numbers that are drawn, several of one place with spaces between them; columns
        without anything in them are left out."""
        rows = [dataclasses.asdict(point) for point in self.points]
        for row in rows:
            row |= {n: " ".join(map(str, v)) for n, v in row.items() if isinstance(v, tuple)}
        used = {name for row in rows for name, value in row.items() if value not in ("", None)}
        return csv_text(
            [{self.columns.get(k, k): v for k, v in row.items() if k in used} for row in rows]
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """The mean over `seeds` seeds at `x`, with the lowest and the highest of them."""

    panel: str
    arm: str
    x: float
    mean: float
    low: float
    high: float
    seeds: int


def file_name(*parts: str) -> str:
    """Parts of a name with what file systems and links take everywhere."""
    return "-".join(re.sub(r"[^A-Za-z0-9_]+", "-", part).strip("-") for part in parts if part)


def figure_name(group: Group, title: str, *more: str) -> str:
    """The name of a figure of one evaluation."""
    return file_name(group.name, title, *more)


def summary(values: Iterable[float]) -> dict[str, Any]:
    """`mean`, `low`, `high` and `seeds` of the values of a point, one a seed, at least one."""
    found = list(values)
    mean = math.fsum(found) / len(found)
    return {"mean": mean, "low": min(found), "high": max(found), "seeds": len(found)}


def over_seeds(
    group: Group, title: str, read: Callable[[Evaluation], Mapping[Any, float]]
) -> dict[str, dict[Any, dict[str, Any]]]:
    """What `read` finds in an evaluation of each arm, by key, summed up over seeds.

    Numbers that are not finite are left out; so are arms without any.
    """
    found: dict[str, dict[Any, dict[str, Any]]] = {}
    for arm in group.arms:
        values: dict[Any, list[float]] = {}
        for _, evaluation in arm.evaluations(title):
            for key, value in read(evaluation).items():
                if math.isfinite(value):
                    values.setdefault(key, []).append(value)
        if values:
            found[arm.name] = {key: summary(each) for key, each in values.items()}
    return found


def draw_lines(axes: "Axes", points: Sequence[Point], looks: Looks) -> None:
    """A line an arm through its means; the band goes from the lowest to the highest seed."""
    for arm, line in by_arm(points).items():
        style = looks[arm]
        x = [point.x for point in line]
        low, high = [point.low for point in line], [point.high for point in line]
        axes.fill_between(x, low, high, color=style.color, alpha=0.14, linewidth=0)
        every = 1 if len(line) <= _MARKED else len(line) // 8
        axes.plot(
            x,
            [point.mean for point in line],
            marker=style.marker,
            markevery=every,
            label=arm,
            **style.line,
        )


def by_arm(points: Iterable[Any]) -> dict[str, list[Any]]:
    """Points in order, by their arm."""
    found: dict[str, list[Any]] = {}
    for point in points:
        found.setdefault(point.arm, []).append(point)
    return found


def legend(canvas: "Canvas", arms: Iterable[str], labels: Mapping[str, str], looks: Looks) -> None:
    """The looks of arms below everything, in the order in which they were found."""
    entries = [(labels[arm], looks[arm]) for arm in dict.fromkeys(arms)]
    style_legend(canvas, entries)


def style_legend(canvas: "Canvas", entries: Sequence[tuple[str, Style]]) -> None:
    """Labels with their looks below everything, in two columns where they fit."""
    from matplotlib.lines import Line2D

    columns, letters = _legend_columns([label for label, _ in entries])
    handles = [
        Line2D([], [], marker=style.marker, label=fill(label, letters), **style.line)
        for label, style in entries
    ]
    canvas.legend(handles=handles, loc=BELOW, ncols=columns)


def legend_height(labels: Iterable[str]) -> float:
    """Inches that the legend of these labels takes."""
    found = list(labels)
    columns, letters = _legend_columns(found)
    lines = sum(max(1, -(-len(label) // letters)) for label in found)
    return 0.15 + 0.19 * -(-lines // columns)


def _legend_columns(labels: Sequence[str]) -> tuple[int, int]:
    """Columns, and the letters of a line in them."""
    narrow, wide = _LEGEND_LETTERS
    fits = len(labels) > 1 and all(len(label) <= narrow for label in labels)
    return (2, narrow) if fits else (1, wide)


def stacked(canvas: "Canvas", count: int, **settings: Any) -> "Iterator[Axes]":
    """So many axes below one another."""
    grid: Any = canvas.subplots(count, 1, squeeze=False, **settings)
    yield from grid[:, 0]
