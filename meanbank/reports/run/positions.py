"""The figure of the loss by position, as it changes over training."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meanbank.reports.axes import token_axis
from meanbank.reports.palette import Style, ramp
from meanbank.reports.run.loading import Run
from meanbank.reports.study.figure import Figure, legend_height, style_legend
from meanbank.reports.wording import decimal

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_NAME = re.compile(r"loss_at/(\d+)-(\d+)")
_TIMES = 6  # lines


@dataclass(frozen=True, kw_only=True)
class PositionPoint:
    """Mean loss at positions `start` to `stop`, of the logged steps from `first` to `last`."""

    first: int
    last: int
    start: int
    stop: int
    loss: float

    @property
    def label(self) -> str:
        return f"step {self.first:,}" + (f" to {self.last:,}" if self.last > self.first else "")


def loss_by_position(run: Run) -> Iterator[Figure]:
    """A line for each part of training."""
    lines = _lines(run)
    if not lines:
        return
    colors = ramp(len(lines))
    labels = [line[0].label for line in lines]

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        for line, color in zip(lines, colors, strict=True):
            x = [(point.start + point.stop) / 2 for point in line]
            axes.plot(x, [point.loss for point in line], color=color, marker="o")
        token_axis(axes, powers_apart=2)
        axes.set_xlabel("tokens before it that a token sees")
        axes.set_ylabel("loss (nats a token)")
        looks = [Style(color=color, marker="o") for color in colors]
        style_legend(canvas, list(zip(labels, looks, strict=True)))

    ends = "; ".join(
        f"{line[0].label} {decimal(line[0].loss)} at {line[0].start} to {line[0].stop} tokens, "
        f"{decimal(line[-1].loss)} at {line[-1].start} to {line[-1].stop}"
        for line in (lines[0], lines[-1])
    )
    yield Figure(
        name="loss-by-position",
        title="Loss by position",
        caption="Loss of training batches by the number of tokens that a token sees before itself, "
        "light at first, dark at last. Each line is the mean over the steps that were logged; the "
        "first points are of few tokens, so they jump. A model that uses its context has lines "
        "that fall to the right.",
        alternative=f"Loss by position, {len(lines)} lines for parts of training: {ends}.",
        height=2.7 + legend_height(labels),
        points=[point for line in lines for point in line],
        draw=draw,
    )


def _lines(run: Run) -> list[list[PositionPoint]]:
    """In order of training, each with its points in order of position."""
    found: dict[int, dict[tuple[int, int], float]] = {}
    for name in run.names(start="loss_at/"):
        match = _NAME.fullmatch(name)
        for step, value in run.series(name) if match else ():
            if match and math.isfinite(value):
                found.setdefault(step, {})[int(match[1]), int(match[2])] = value
    steps, lines = sorted(found), []
    count = min(_TIMES, len(steps))
    for number in range(count):
        share = steps[number * len(steps) // count : (number + 1) * len(steps) // count]
        places = sorted({place for step in share for place in found[step]})
        line = []
        for start, stop in places:
            losses = [found[s][start, stop] for s in share if (start, stop) in found[s]]
            loss = math.fsum(losses) / len(losses)
            line.append(
                PositionPoint(first=share[0], last=share[-1], start=start, stop=stop, loss=loss)
            )
        lines.append(line)
    return lines
