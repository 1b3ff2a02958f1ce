"""The figure of training: quality against tokens, FLOPs and time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from meanbank.reports.study.figure import (
    MOST_ARMS,
    Figure,
    Looks,
    Point,
    by_arm,
    draw_lines,
    file_name,
    legend,
    legend_height,
    stacked,
    summary,
)
from meanbank.reports.study.results import Arm, Group, Job
from meanbank.reports.study.statistics import mean_of
from meanbank.reports.wording import decimal, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_SMOOTHING = 1 / 25  # of a run
_POINTS = 60  # a line
_FALL = 0.2  # the first part of training, which would flatten all that follows


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """An arm after `step` steps: means over `seeds` seeds, with the lowest and the highest."""

    arm: str
    step: int
    tokens: float | None
    flops: float | None
    seconds: float | None
    mean: float
    low: float
    high: float
    seeds: int


# What stands on the horizontal axes, with the units that ticks are told in, each from where on.
_PANELS = (
    ("tokens", "tokens seen", (("", 1, 0), ("K", 1e3, 1e3), ("M", 1e6, 1e6), ("B", 1e9, 1e9))),
    (
        "flops",
        "FLOPs of training",
        (("M", 1e6, 0), ("G", 1e9, 1e9), ("T", 1e12, 1e12), ("P", 1e15, 1e15), ("E", 1e18, 1e18)),
    ),
    ("seconds", "time of training", ((" s", 1, 0), (" min", 60, 120), (" h", 3600, 7200))),
)


def training(group: Group, looks: Looks) -> Iterator[Figure]:
    """Held-out bits per byte, or the smoothed training loss where no arm has any.

    Lines of more arms than can be told apart are not drawn.
    """
    if len(group.arms) > MOST_ARMS:
        return
    held_out = any(s.held_out is not None for arm in group.arms for j in arm.jobs for s in j.steps)
    points = [point for arm in group.arms for point in _curve(arm, held_out)]
    panels = [panel for panel in _PANELS if any(getattr(p, panel[0]) for p in points)]
    if not points or not panels:
        return
    what = "bits per byte of held-out text" if held_out else "training loss (nats a token)"
    labels = [group.labels[arm] for arm in by_arm(points)]

    def draw(canvas: "Canvas") -> None:
        for (name, said, units), axes in zip(panels, stacked(canvas, len(panels)), strict=True):
            draw_lines(axes, _panel_points(points, name), looks)
            _set_ticks(axes, max(getattr(p, name) or 0.0 for p in points), units)
            axes.set_xlabel(said)
            axes.set_ylabel("bits per byte" if held_out else "loss (nats a token)")
            axes.set_ylim(top=_top(points))
        legend(canvas, by_arm(points), group.labels, looks)

    ends = (
        f"{group.labels[arm]} {decimal(line[-1].mean)} after {short_count(round(last))} tokens"
        for arm, line in by_arm(points).items()
        if (last := line[-1].tokens) is not None
    )
    title = "Training: held-out text" if held_out else "Training: loss"
    smooth = "" if held_out else f", smoothed over a {round(1 / _SMOOTHING)}th of the run"
    yield Figure(
        name=file_name(group.name, "training"),
        title=title,
        caption=f"{what[0].upper()}{what[1:]}{smooth} against tokens, FLOPs and wall-clock time. "
        "Lines are means over seeds; bands go from the lowest to the highest seed. FLOPs are the "
        "run's own in proportion to its steps.",
        alternative=f"{title}, {len(panels)} panels with a line an arm. Last points: "
        f"{'; '.join(ends)}.",
        height=2.2 * len(panels) + legend_height(labels),
        points=points,
        draw=draw,
        columns={"mean": "bits_per_byte" if held_out else "loss"},
    )


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over about a 25th of the run around each value: centred, so that it does not lag."""
    reach = round(len(values) * _SMOOTHING / 2)
    sums = [0.0, *accumulate(values)]
    averages = []
    for index in range(len(values)):
        first, stop = max(0, index - reach), min(len(values), index + reach + 1)
        averages.append((sums[stop] - sums[first]) / (stop - first))
    return averages


def _curve(arm: Arm, held_out: bool) -> Iterator[CurvePoint]:
    curves = [found for job in arm.jobs if (found := _values(job, held_out))]
    if not curves:
        return
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    shown = [common[round(i)] for i in _spread(len(common))]
    for step in dict.fromkeys(shown):
        places = [curve[step] for curve in curves]
        yield CurvePoint(
            arm=arm.name,
            step=step,
            **{name: _mean_at(places, name) for name, _, _ in _PANELS},
            **summary(place["value"] for place in places),
        )


def _spread(count: int) -> list[float]:
    if count <= _POINTS:
        return list(range(count))
    return [index * (count - 1) / (_POINTS - 1) for index in range(_POINTS)]


def _values(job: Job, held_out: bool) -> dict[int, dict[str, Any]]:
    """By step: the value, and tokens, FLOPs and seconds until then."""
    name = "held_out" if held_out else "loss"
    steps = [(step, getattr(step, name)) for step in job.steps]
    steps = [(step, value) for step, value in steps if value is not None and math.isfinite(value)]
    values = [value for _, value in steps]
    last = job.steps[-1].step if job.steps else 0
    found = {}
    for (step, _), value in zip(steps, values if held_out else smoothed(values), strict=True):
        share = step.step / last if last else 0.0
        tokens = step.tokens if step.tokens is not None else _share(job.tokens, share)
        flops = _share(job.flops, share)
        found[step.step] = {
            "value": value,
            "tokens": tokens,
            "flops": flops,
            "seconds": step.seconds,
        }
    return found


def _share(whole: float | None, share: float) -> float | None:
    return None if whole is None else whole * share


def _mean_at(places: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over seeds; None where one of them lacks it."""
    values = [place[name] for place in places]
    return None if None in values else mean_of(values)


def _panel_points(points: Sequence[CurvePoint], name: str) -> list[Point]:
    """As they stand over one of the horizontal axes."""
    return [
        Point(panel=name, arm=p.arm, x=x, mean=p.mean, low=p.low, high=p.high, seeds=p.seeds)
        for p in points
        if (x := getattr(p, name)) is not None
    ]


def _set_ticks(axes: "Axes", last: float, units: Sequence[tuple[str, float, float]]) -> None:
    """Round numbers of the unit that `last` is told in."""
    from matplotlib.ticker import MaxNLocator

    name, size, _ = [unit for unit in units if last >= unit[2]][-1]
    ticks = [tick for tick in MaxNLocator(5).tick_values(0, last / size) if tick * size <= last]
    axes.set_xticks(
        [tick * size for tick in ticks], [f"{tick:g}{name}" if tick else "0" for tick in ticks]
    )


def _top(points: Sequence[CurvePoint]) -> float | None:
    """Where the vertical axis ends: above every line once the first fall is over."""
    later: Mapping[str, list[float]] = {
        arm: [p.high for p in line if p.step >= _FALL * line[-1].step]
        for arm, line in by_arm(points).items()
    }
    highest = max(max(values) for values in later.values())
    lowest = min(point.low for point in points)
    return highest + 0.05 * (highest - lowest) if highest > lowest else None
