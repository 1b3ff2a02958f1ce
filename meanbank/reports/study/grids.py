"""Heat maps: scores by depth and length, accuracies by distance and length."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.files import as_count, as_number, as_objects
from meanbank.reports.study.figure import (
    Figure,
    Looks,
    figure_name,
    over_seeds,
)
from meanbank.reports.study.results import Group
from meanbank.reports.wording import decimal, length, two_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_Key = tuple[tuple[float, str], tuple[int, int, str]]  # row and column: their order and name

_HEAT = "cividis"  # the same to readers with any colour vision, and in grey


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One field of a heat map: the mean over `seeds` seeds."""

    arm: str
    row: str
    column: str
    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Cells, and the names of all rows and columns in order."""

    cells: list[Cell]
    rows: list[str]
    columns: list[str]


def depth_by_length(group: Group, looks: Looks) -> Iterator[Figure]:
    """How well is found what stands at some depth of a prompt of some length, a panel an arm."""
    for title in group.titles("ruler"):
        evaluations = [one for arm in group.arms for _, one in arm.evaluations(title)]
        rows = [row for one in evaluations for row in as_objects(one.results.get("depths"))]
        for task in dict.fromkeys(str(row.get("task", "")) for row in rows):
            grid = _grid(group, title, lambda one, task=task: _depths(one.results, task))
            yield from _heat_figure(
                group,
                grid,
                name=figure_name(group, title, "depths", task),
                title=f"Depth by length: {task}",
                caption=f"Score of {task} by the depth at which the answer stands in the prompt "
                "(0 is its start) and the prompt's length; a panel an arm, means over seeds.",
                columns={"row": "depth", "column": "length", "mean": "score"},
                axes_names=("tokens in the prompt", "depth"),
            )


def distance_by_length(group: Group, looks: Looks) -> Iterator[Figure]:
    """Recall by the distance from the question back to the pair, a panel an arm."""
    for title in group.titles("mqar"):
        grid = _grid(group, title, lambda one: _distances(one.results))
        yield from _heat_figure(
            group,
            grid,
            name=figure_name(group, title, "distances"),
            title=f"Distance by length: {title}",
            caption="Accuracy by the tokens between a pair and its question, and by the length of "
            "the sequence / the pairs in it; a panel an arm, means over seeds.",
            columns={"row": "distance", "column": "setting", "mean": "accuracy"},
            axes_names=("tokens / pairs", "distance"),
        )


def _depths(results: Mapping[str, Any], task: str) -> dict[_Key, float]:
    found = {}
    for row in as_objects(results.get("depths")):
        tokens, depth = as_count(row.get("length")), as_number(row.get("depth"))
        score = as_number(row.get("score"))
        if str(row.get("task", "")) != task or tokens is None or depth is None or score is None:
            continue
        found[(depth, f"{depth:g}"), (tokens, 0, length(tokens))] = score
    return found


def _distances(results: Mapping[str, Any]) -> dict[_Key, float]:
    found = {}
    for row in as_objects(results.get("by_distance")):
        tokens, pairs = as_count(row.get("length")), as_count(row.get("pairs"))
        start, stop = as_count(row.get("from")), as_count(row.get("below"))
        value = as_number(row.get("accuracy"))
        if tokens is None or pairs is None or start is None or stop is None or value is None:
            continue
        column = (tokens, pairs, f"{length(tokens)}/{pairs}")
        found[(start, f"{length(start)}–{length(stop)}"), column] = value
    return found


def _grid(group: Group, title: str, read: Any) -> _Grid:
    found = over_seeds(group, title, read)
    cells = [
        Cell(arm=arm, row=row[-1], column=column[-1], **values)
        for arm, line in found.items()
        for (row, column), values in sorted(line.items())
    ]
    keys = {key for line in found.values() for key in line}  # an arm need not have all
    rows, columns = (
        list(dict.fromkeys(name for *_, name in sorted({key[axis] for key in keys})))
        for axis in (0, 1)
    )
    return _Grid(cells=cells, rows=rows, columns=columns)


def _heat_figure(
    group: Group,
    found: _Grid,
    *,
    name: str,
    title: str,
    caption: str,
    columns: dict[str, str],
    axes_names: tuple[str, str],
) -> Iterator[Figure]:
    cells, rows, fields = found.cells, found.rows, found.columns
    if not cells:
        return
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    across = 2 if len(arms) > 1 and len(fields) <= 5 else 1
    lines = -(-len(arms) // across)

    def draw(canvas: "Canvas") -> None:
        grid: Any = canvas.subplots(lines, across, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(arms) :]:
            axes.set_visible(False)
        picture = None
        for axes, arm in zip(grid.flat, arms, strict=False):
            picture = _draw_heat(axes, [c for c in cells if c.arm == arm], rows, fields)
            axes.set_title(fill(group.labels[arm], 23 if across == 2 else 60), fontsize=8.5)
        for index, axes in enumerate(grid.flat[: len(arms)]):
            axes.label_outer()
            if index + across >= len(arms):  # nothing below it
                axes.tick_params(axis="x", labelbottom=True)
        canvas.supxlabel(axes_names[0], fontsize=9)
        canvas.supylabel(axes_names[1], fontsize=9)
        if picture is not None:
            canvas.colorbar(picture, ax=grid, shrink=0.7, aspect=25, pad=0.02)

    yield Figure(
        name=name,
        title=title,
        caption=caption,
        alternative=_heat_words(group, cells, arms, title),
        height=0.7 + lines * (0.45 + 0.27 * max(3, len(rows))),
        points=cells,
        draw=draw,
        columns=columns,
    )


def _draw_heat(axes: "Axes", cells: list[Cell], rows: list[str], columns: list[str]) -> Any:
    values = [[float("nan")] * len(columns) for _ in rows]
    for cell in cells:
        values[rows.index(cell.row)][columns.index(cell.column)] = cell.mean
    picture = axes.imshow(values, cmap=_HEAT, vmin=0, vmax=1, aspect="auto")
    for cell in cells:
        axes.text(
            columns.index(cell.column),
            rows.index(cell.row),
            two_digits(cell.mean),
            ha="center",
            va="center",
            fontsize=8,
            color="black" if cell.mean > 0.45 else "white",
        )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return picture


def _heat_words(group: Group, cells: list[Cell], arms: list[str], title: str) -> str:
    parts = []
    for arm in arms:
        mine = [cell for cell in cells if cell.arm == arm]
        worst = min(mine, key=lambda cell: cell.mean)
        mean = sum(cell.mean for cell in mine) / len(mine)
        parts.append(
            f"{group.labels[arm]}: mean {decimal(mean, 2)}, lowest {decimal(worst.mean, 2)} at "
            f"{worst.row} and {worst.column}"
        )
    return f"{title}, a heat map an arm. {'; '.join(parts)}."
