"""Figures of lines: loss by position, scores by length, memory by context."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meanbank.reports.axes import byte_axis, label_ends, mark_tokens, token_axis
from meanbank.reports.files import as_count, as_number, as_objects
from meanbank.reports.study.figure import (
    Figure,
    Looks,
    Point,
    by_arm,
    draw_lines,
    figure_name,
    legend,
    legend_height,
    over_seeds,
    stacked,
)
from meanbank.reports.study.results import Evaluation, Group
from meanbank.reports.wording import binary_size, decimal, length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# The first tokens of a document cost so much more that they would flatten all that follows.
FIRST_SHOWN = 1 / 8  # of the training length
_BAND = "Lines are means over seeds; bands go from the lowest to the highest seed."


def loss_by_position(group: Group, looks: Looks) -> Iterator[Figure]:
    """Mean loss of each bucket of positions."""
    for title in group.titles("position-loss"):
        trained = _training_length(group, title)
        points = _points(group, title, lambda one: _bucket_losses(one.results))
        points = [point for point in points if point.x >= trained * FIRST_SHOWN]

        def finish(axes: "Axes", trained: int = trained) -> None:
            axes.set_xlabel("position in the document (tokens)")
            axes.set_ylabel("loss (nats a token)")
            if trained:
                mark_tokens(axes, trained, f"trained to {length(trained)}")

        yield from _line_figure(
            group,
            points,
            looks,
            name=figure_name(group, title),
            title=f"Loss by position{_named(title, 'position-loss')}",
            caption="Loss by position in held-out documents, from an eighth of the training "
            f"length on. {_BAND} Right of the dotted line, models are beyond any length that "
            "they were trained on.",
            columns={"x": "position", "mean": "loss"},
            finish=finish,
        )


def score_by_length(group: Group, looks: Looks) -> Iterator[Figure]:
    """Scores of long-context tasks, a panel a task."""
    for title in group.titles("ruler"):
        points = _points(group, title, lambda one: _task_scores(one.results))

        def finish(axes: "Axes") -> None:
            axes.set_xlabel("tokens in the prompt")
            axes.set_ylabel("score")
            axes.set_ylim(-0.02, max(1.02, axes.get_ylim()[1]))

        yield from _line_figure(
            group,
            points,
            looks,
            name=figure_name(group, title),
            title=f"Score by length{_named(title, 'ruler')}",
            caption=f"Score by length of the prompt, a panel a task. {_BAND}",
            columns={"panel": "task", "x": "length", "mean": "score"},
            finish=finish,
        )


def memory_by_context(group: Group, looks: Looks) -> Iterator[Figure]:
    """Bytes of state against tokens read, both logarithmic."""
    for title in group.titles("memory"):
        points = _points(group, title, lambda one: _context_bytes(one.results))

        def finish(axes: "Axes", points: list[Point] = points) -> None:
            axes.set_xlabel("tokens read")
            axes.set_ylabel("bytes held by one sequence")
            byte_axis(axes)
            ends = {}
            for arm, line in by_arm(points).items():
                text = binary_size(line[-1].mean)  # equal ones stand there once
                ends.setdefault(text, (line[-1].mean, text, looks[arm].color))
            label_ends(axes, ends.values())

        yield from _line_figure(
            group,
            points,
            looks,
            name=figure_name(group, title),
            title=f"Memory by context{_named(title, 'memory')}",
            caption="Bytes that one sequence holds after so many tokens, on logarithmic axes. The "
            "numbers on the right are the last points of the lines. Tables of a bank are "
            "parameters, held once for all sequences, and not counted here.",
            columns={"x": "tokens", "mean": "bytes"},
            finish=finish,
            say=binary_size,
        )


def _training_length(group: Group, title: str) -> int:
    found = (one for arm in group.arms for _, one in arm.evaluations(title))
    lengths = (as_count(one.results.get("training_length")) for one in found)
    return next((length for length in lengths if length), 0)


def _bucket_losses(results: Mapping[str, Any]) -> dict[tuple[str, float], float]:
    found = {}
    for bucket in as_objects(results.get("buckets")):
        start, stop = as_number(bucket.get("start")), as_number(bucket.get("stop"))
        loss = as_number(bucket.get("loss"))
        if start is not None and stop is not None and loss is not None:
            found["", (start + stop) / 2] = loss
    return found


def _task_scores(results: Mapping[str, Any]) -> dict[tuple[str, float], float]:
    found = {}
    for row in as_objects(results.get("rows")):
        tokens, score = as_count(row.get("length")), as_number(row.get("score"))
        if tokens and score is not None:
            found[str(row.get("task", "")), tokens] = score
    return found


def _context_bytes(results: Mapping[str, Any]) -> dict[tuple[str, float], float]:
    found = {}
    for row in as_objects(results.get("contexts")):
        tokens, size = as_count(row.get("tokens")), as_number(row.get("bytes"))
        if tokens and size:  # a logarithmic axis has no zero
            found["", tokens] = size
    return found


def _points(
    group: Group, title: str, read: Callable[[Evaluation], Mapping[tuple[str, float], float]]
) -> list[Point]:
    found = over_seeds(group, title, read)
    return [
        Point(panel=panel, arm=arm, x=x, **values)
        for arm, line in found.items()
        for (panel, x), values in sorted(line.items(), key=lambda item: item[0][1])
    ]


def _named(title: str, task: str) -> str:
    return "" if title == task else f": {title}"


def _line_figure(
    group: Group,
    points: list[Point],
    looks: Looks,
    *,
    name: str,
    title: str,
    caption: str,
    columns: dict[str, str],
    finish: "Callable[[Axes], None]",
    say: Callable[[float], str] = decimal,
) -> Iterator[Figure]:
    if not points:
        return
    panels = list(dict.fromkeys(point.panel for point in points))
    labels = [group.labels[arm] for arm in by_arm(points)]

    def draw(canvas: "Canvas") -> None:
        for panel, axes in zip(panels, stacked(canvas, len(panels)), strict=True):
            shown = [point for point in points if point.panel == panel]
            draw_lines(axes, shown, looks)
            _spread_tokens(axes, shown)
            axes.set_title(panel)
            finish(axes)
        legend(canvas, by_arm(points), group.labels, looks)

    yield Figure(
        name=name,
        title=title,
        caption=caption,
        alternative=_alternative(group, points, title, say),
        height=(2.9 if len(panels) == 1 else 2.2 * len(panels)) + legend_height(labels),
        points=points,
        draw=draw,
        columns=columns,
    )


def _spread_tokens(axes: "Axes", points: list[Point]) -> None:
    octaves = math.log2(max(p.x for p in points) / max(1, min(p.x for p in points)))
    token_axis(axes, powers_apart=1 if octaves <= 6 else 2)


def _alternative(group: Group, points: list[Point], title: str, say: Callable[[float], str]) -> str:
    ends = []
    for panel in dict.fromkeys(point.panel for point in points):
        for arm, line in by_arm(p for p in points if p.panel == panel).items():
            where = f" ({panel})" if panel else ""
            first, last = line[0], line[-1]
            ends.append(
                f"{group.labels[arm]}{where} from {say(first.mean)} at {length(round(first.x))} "
                f"to {say(last.mean)} at {length(round(last.x))} tokens"
            )
    return f"{title}, a line an arm. First to last point: {'; '.join(ends)}."
