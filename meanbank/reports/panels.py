"""Each plot on one pair of axes; figures put them together."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from meanbank.reports.palette import GUIDE, STYLES
from meanbank.reports.results import Bigram, Bucket, LanguageArm, PositionLoss, RecallArm
from meanbank.reports.tables import CHANCE, MEMORY_CONTEXTS
from meanbank.reports.wording import binary_size, length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The first tokens of a document cost so much more that they would flatten all that follows.
FIRST_SHOWN = 1 / 8
_SMOOTHING = 1 / 25
_LEAST_LABEL_GAP = 0.05


def shown_buckets(loss: PositionLoss) -> list[Bucket]:
    """The buckets from an eighth of the training length on."""
    first = (loss.training_length or 0) * FIRST_SHOWN
    return [bucket for bucket in loss.buckets if _center(bucket) >= first]


def _center(bucket: Bucket) -> float:
    return (bucket.start + bucket.stop) / 2


def draw_loss_by_position(axes: "Axes", arms: Sequence[LanguageArm]) -> None:
    """Mean loss of each bucket of positions, with one standard error to both sides."""
    trained = None
    for arm in arms:
        if arm.position_loss is None:
            continue
        trained = trained or arm.position_loss.training_length
        style = STYLES[arm.name]
        buckets = shown_buckets(arm.position_loss)
        centers = [_center(bucket) for bucket in buckets]
        losses = [bucket.loss for bucket in buckets]
        errors = [bucket.standard_error or 0.0 for bucket in buckets]
        low = [loss - error for loss, error in zip(losses, errors, strict=True)]
        high = [loss + error for loss, error in zip(losses, errors, strict=True)]
        axes.fill_between(centers, low, high, color=style.color, alpha=0.12, linewidth=0)
        axes.plot(centers, losses, marker=style.marker, **style.line)
    axes.set_title("Loss by position")
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("loss (nats a token)")
    token_axis(axes, powers_apart=1)
    if trained:
        _mark_context(axes, trained, f"trained to {length(trained)}")


def draw_recall(axes: "Axes", arms: Sequence[RecallArm], settings: list[tuple[int, int]]) -> None:
    """Accuracy in groups by (length, pairs): a point a seed, a bar for the mean."""
    spacing = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        style = STYLES[arm.name]
        offset = (index - (len(arms) - 1) / 2) * spacing
        for group, setting in enumerate(settings):
            place = group + offset
            values = [run.accuracy[setting] for run in arm.runs if setting in run.accuracy]
            mean = arm.mean(setting)
            if mean is None:
                continue
            half = 0.42 * spacing
            axes.hlines(mean, place - half, place + half, color=style.color, linewidth=2.6)
            axes.plot(
                [place] * len(values),
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
    axes.axhline(CHANCE, color=GUIDE, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "chance, 1/32",
        (len(settings) - 0.55, CHANCE),
        xytext=(0, 3),
        textcoords="offset points",
        color=GUIDE,
        fontsize=8,
        horizontalalignment="right",
    )
    axes.set_xlim(-0.5, len(settings) - 0.5)
    axes.set_ylim(0, 1.02)
    ticks = [f"{length(tokens)}\n/{pairs}" for tokens, pairs in settings]
    axes.set_xticks(range(len(settings)), ticks)
    axes.tick_params(axis="x", length=0, labelsize=8.5 if len(settings) <= 7 else 7)
    axes.set_title("Associative recall")
    axes.set_xlabel("tokens in the sequence / pairs to recall")
    axes.set_ylabel("accuracy")


def draw_memory(axes: "Axes", arms: Sequence[LanguageArm], *, label_ends: bool = True) -> None:
    """Bytes of state against context, both logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ends = []
    for arm in arms:
        sizes = arm.memory.bytes_at if arm.memory else {}
        # A logarithmic axis has no zero.
        shown = {tokens: size for tokens, size in sizes.items() if tokens > 0 and size > 0}
        if not shown:
            continue
        style = STYLES[arm.name]
        axes.plot(list(shown), list(shown.values()), marker=style.marker, **style.line)
        tokens = max(shown)
        ends.append((shown[tokens], binary_size(shown[tokens]), style.color))
    axes.set_title("Memory by context")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("bytes held by one sequence")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=16))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _round_size(size)))
    token_axis(axes, powers_apart=2)
    for context in MEMORY_CONTEXTS:
        _mark_context(axes, context, None)
    if label_ends:
        _label_ends(axes, ends)


def draw_training_loss(axes: "Axes", arms: Sequence[LanguageArm]) -> None:
    """Training loss, smoothed, over the faint loss of every step."""
    starts, lows = [], []
    for arm in arms:
        losses = arm.run.curve.losses if arm.run else ()
        finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
        if not finite:
            continue
        steps, raw = zip(*finite, strict=True)
        smooth = smoothed(raw)
        style = STYLES[arm.name]
        axes.plot(steps, raw, color=style.color, alpha=0.15, linewidth=0.7)
        axes.plot(steps, smooth, **style.line)
        starts.append(smooth[len(smooth) // 25])
        lows.append(min(raw))
    if starts and max(starts) > min(lows):
        # The fall of the first steps is the same for all and would flatten the rest.
        axes.set_ylim(top=max(starts) + 0.05 * (max(starts) - min(lows)))
    axes.set_title("Training loss, smoothed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over about a 25th of the run around each value: centred, so that it does not lag."""
    reach = round(len(values) * _SMOOTHING / 2)
    sums = [0.0, *accumulate(values)]
    averages = []
    for index in range(len(values)):
        first, stop = max(0, index - reach), min(len(values), index + reach + 1)
        averages.append((sums[stop] - sums[first]) / (stop - first))
    return averages


def draw_held_out(axes: "Axes", arms: Sequence[LanguageArm], bigram: Bigram | None) -> None:
    """Held-out bits per byte during training, and the bigram baseline as a line."""
    for arm in arms:
        points = arm.run.curve.held_out if arm.run else ()
        if points:
            style = STYLES[arm.name]
            steps, bits = zip(*points, strict=True)
            axes.plot(steps, bits, marker=style.marker, linewidth=1, **style.line)
    if bigram and bigram.bits_per_byte is not None:
        axes.axhline(bigram.bits_per_byte, color=GUIDE, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "bigram baseline",
            (1, bigram.bits_per_byte),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=GUIDE,
            fontsize=8,
            horizontalalignment="right",
        )
    axes.set_title("Held-out text")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")


def token_axis(axes: "Axes", *, powers_apart: int) -> None:
    """A logarithmic axis of tokens, with a label every so many powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2**powers_apart, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: length(round(tokens))))


def _mark_context(axes: "Axes", tokens: int, text: str | None) -> None:
    axes.axvline(tokens, color=GUIDE, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axes.annotate(
        text or length(tokens),
        (tokens, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3, -1),
        textcoords="offset points",
        color=GUIDE,
        fontsize=8,
        horizontalalignment="right",
        verticalalignment="top",
    )


def _round_size(size: float) -> str:
    text = binary_size(size)
    number, unit = text.split(" ")
    return f"{float(number):g} {unit}"


def _label_ends(axes: "Axes", ends: list[tuple[int, str, str]]) -> None:
    """Write each line's last value beside it, apart from one another; equal values once."""
    low, high = axes.get_ylim()
    lowest = -1.0
    seen = set()
    for size, text, color in sorted(ends, key=lambda end: end[0]):
        if text in seen:
            continue
        seen.add(text)
        height = math.log(size / low) / math.log(high / low)
        lowest = max(height, lowest + _LEAST_LABEL_GAP)
        axes.annotate(
            text,
            (1.015, lowest),
            xycoords="axes fraction",
            color=color,
            fontsize=8.5,
            verticalalignment="center",
        )
