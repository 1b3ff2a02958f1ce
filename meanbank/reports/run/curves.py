"""Figures of training step by step: loss, optimizer, speed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from meanbank.reports.axes import log_axis
from meanbank.reports.curves import Points
from meanbank.reports.palette import BELOW, ramp
from meanbank.reports.run.loading import Run
from meanbank.reports.study.curves import smoothed
from meanbank.reports.study.figure import Figure, legend_height, stacked
from meanbank.reports.wording import measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_COLOR, _MARKED, _POINTS = "#0072B2", 24, 400
_WIDE = 50  # greatest over least value from which an axis is logarithmic
_PANEL = 1.75  # inches

Series = tuple["CurvePoint", ...]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A metric after `step` steps: the mean of its share of them, and the smoothed line there."""

    metric: str
    step: int
    value: float
    smoothed: float | None = None


def curve_figures(run: Run) -> Iterator[Figure]:
    """All of them that the run has numbers for."""
    yield from _lines(
        run,
        "loss",
        "Loss",
        "Loss of each training batch (light) and smoothed over a 25th of the run (dark), and bits "
        "per byte of held-out text.",
        {"loss": "training loss (nats)", "held_out_bpb": "held-out bits per byte"},
    )
    yield from _lines(
        run,
        "optimizer",
        "Gradient and learning rate",
        "The norm of the whole gradient before it is clipped, and the learning rate of the first "
        "group of parameters.",
        {"gradient_norm": "gradient norm", "learning_rate": "learning rate"},
    )
    yield from _lines(
        run,
        "speed",
        "Speed",
        "Tokens that training steps read a second; what lies between steps is not counted.",
        {"tokens_per_second": "tokens a second"},
    )
    yield from _split(run)


def curve(run: Run, name: str) -> Series:
    """A metric with a smoothed line, at most `_POINTS` points; what is not finite is left out."""
    points = [(step, value) for step, value in run.series(name) if math.isfinite(value)]
    if len(points) < _MARKED or name == "learning_rate":  # which is smooth
        return tuple(CurvePoint(metric=name, step=s, value=value) for s, value in thinned(points))
    even = smoothed([value for _, value in points])
    return tuple(
        CurvePoint(metric=name, step=step, value=value, smoothed=line)
        for (step, value), (_, line) in zip(
            thinned(points),
            thinned([(s, v) for (s, _), v in zip(points, even, strict=True)]),
            strict=True,
        )
    )


def thinned(points: Sequence[tuple[int, float]], most: int = _POINTS) -> Points:
    """At most so many points: the means of shares of them, at the last step of each."""
    count = min(most, len(points))
    edges = [index * len(points) // count for index in range(count + 1)] if count else []
    found = []
    for start, stop in pairwise(edges):
        share = points[start:stop]
        found.append((share[-1][0], math.fsum(value for _, value in share) / len(share)))
    return tuple(found)


def _lines(
    run: Run, name: str, title: str, caption: str, labels: dict[str, str]
) -> Iterator[Figure]:
    """A panel for each metric that the run has."""
    curves = {label: found for metric, label in labels.items() if (found := curve(run, metric))}
    if not curves:
        return

    def draw(canvas: "Canvas") -> None:
        panels = list(stacked(canvas, len(curves), sharex=True))
        for axes, (label, points) in zip(panels, curves.items(), strict=True):
            _draw(axes, points)
            axes.set_title(label)
        panels[-1].set_xlabel("steps")

    said = "; ".join(
        f"{label} from {measured(points[0].value)} after step {points[0].step:,} to "
        f"{measured(points[-1].value)} after step {points[-1].step:,}"
        for label, points in curves.items()
    )
    yield Figure(
        name=name,
        title=title,
        caption=caption,
        alternative=f"{title} over the steps of training, a panel each: {said}.",
        height=_PANEL * len(curves) + 0.35,
        points=[point for points in curves.values() for point in points],
        draw=draw,
    )


def _draw(axes: "Axes", points: Series) -> None:
    steps = [point.step for point in points]
    values = [point.value for point in points]
    if min(values) > 0 and max(values) > _WIDE * min(values) and points[0].smoothed is not None:
        log_axis(axes)
    if points[0].smoothed is None:
        axes.plot(steps, values, color=_COLOR, marker="o" if len(points) < _MARKED else "")
        return
    axes.plot(steps, values, color=_COLOR, linewidth=0.9, alpha=0.4)
    axes.plot(steps, [_even(point) for point in points], color=_COLOR)


def _split(run: Run) -> Iterator[Figure]:
    """Where the time of a step goes."""
    names = run.names(end="_seconds")
    curves = {name.removesuffix("_seconds"): curve(run, name) for name in names}
    curves = {part: points for part, points in curves.items() if points}
    steps = [point.step for point in next(iter(curves.values()), ())]
    if not steps or any([p.step for p in points] != steps for points in curves.values()):
        return
    colors = dict(zip(curves, ramp(len(curves)), strict=True))
    means = {part: math.fsum(p.value for p in of) / len(of) for part, of in curves.items()}
    whole = math.fsum(means.values()) or 1.0
    labels = {part: f"{part} {100 * mean / whole:.0f} %" for part, mean in means.items()}

    def draw(canvas: "Canvas") -> None:
        from matplotlib.patches import Patch

        axes = canvas.subplots()
        heights = [[1000 * _even(point) for point in points] for points in curves.values()]
        axes.stackplot(steps, heights, colors=list(colors.values()), alpha=0.85, linewidth=0)
        axes.set_ylabel("milliseconds")
        axes.set_xlabel("steps")
        axes.margins(x=0)
        handles = [Patch(color=color, label=labels[part]) for part, color in colors.items()]
        canvas.legend(handles=handles, loc=BELOW, ncols=2)

    yield Figure(
        name="step-split",
        title="Where a step spends its time",
        caption="Milliseconds of the parts of a step, one on the other, smoothed over a 25th of "
        "the run; the shares are those of the whole run.",
        alternative=f"Time of the parts of a training step, stacked: {', '.join(labels.values())}.",
        height=2.3 + legend_height(labels.values()),
        points=[point for points in curves.values() for point in points],
        draw=draw,
    )


def _even(point: CurvePoint) -> float:
    return point.value if point.smoothed is None else point.smoothed
