"""Claims with their verdicts: the table, and the figure of means and intervals."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from meanbank.reports.palette import GUIDE
from meanbank.reports.study.figure import Figure, stacked
from meanbank.reports.study.results import Claim, NotTestable, Study
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import DASH, measured, probability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Verdict -> symbol and tone: the word, the symbol and the colour all say it.
_VERDICTS = {
    "holds": ("✓", "good"),
    "does not hold": ("✗", "bad"),
    "undecided": ("?", "open"),
    "suggestive: holds": ("(✓)", "open"),
    "suggestive: does not hold": ("(✗)", "open"),
    "not measured": (DASH, ""),
    "not testable": (DASH, ""),
}
_INK = {"good": "#00664a", "bad": "#a63c00", "open": "#4a4a4a", "": GUIDE}
NOT_TESTABLE = "not testable at this scale"
_SIDES = {">": 1, ">=": 1, "<": -1, "<=": -1}
_LETTERS = 62  # a line of a claim in the figure


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One drawn number of a claim; what: seed, mean, low, high or threshold."""

    claim: str
    what: str
    seed: str
    value: float


def verdict_said(claim: Claim) -> str:
    """Symbol and word."""
    symbol, _ = _VERDICTS.get(claim.verdict, ("?", "open"))
    return f"{symbol} {claim.verdict}"


def tone(claim: Claim) -> str:
    """Of the row in the table."""
    return _VERDICTS.get(claim.verdict, ("?", "open"))[1]


def claims_table(study: Study) -> Table | None:
    """One row a claim; None where there are none."""
    if not study.claims:
        return None
    return Table(
        title="Claims",
        meaning=tuple(
            text
            for text in (
                study.rule,
                "Small numbers below a mean are those of the seeds; tuning seeds, on which "
                "settings were chosen, count in nothing. p: how likely a mean this far from the "
                "threshold is by chance; Holm's takes into account how many claims were tried.",
            )
            if text
        ),
        columns=("Claim", "Verdict", "Mean", "Interval", "Threshold", "p (Holm)"),
        rows=tuple(Row(cells=_cells(claim), tone=tone(claim)) for claim in study.claims),
        text_columns=2,
    )


def _cells(claim: Claim) -> tuple[str, ...]:
    details = [f"Source: {claim.source}"] if claim.source else []
    details += [f"Note: {note}" for note in claim.notes]
    expected = f"\nexpected: {claim.expected}" if claim.expected else ""
    return (
        "\n".join([claim.says or claim.name, *details]),
        verdict_said(claim) + expected,
        "\n".join([number_said(claim, claim.mean), *_seeds(claim)]),
        _intervals(claim),
        threshold_said(claim),
        probability(claim.p_holm) + ("" if claim.p is None else f"\nraw: {probability(claim.p)}"),
    )


def not_testable_table(claims: Sequence[NotTestable]) -> Table | None:
    """Published claims that were not tested, and why; None where there are none."""
    if not claims:
        return None
    return Table(
        title=NOT_TESTABLE.capitalize(),
        meaning=("Published claims that are out of reach of small models on a CPU.",),
        columns=("Claim", "Why not"),
        rows=tuple(Row(cells=(f"{c.says}\nSource: {c.source}", c.why)) for c in claims),
        text_columns=2,
    )


def _seeds(claim: Claim) -> Iterator[str]:
    for values, said in ((claim.values, ""), (claim.tuning_values, "tuning: ")):
        if values:
            yield said + ", ".join(number_said(claim, value) for value in values.values())


def _intervals(claim: Claim) -> str:
    lines = [range_said(claim, claim.interval)]
    if claim.interval and claim.interval_kind:
        lines.append(claim.interval_kind)
    if claim.bootstrap:
        lines.append(f"bootstrap: {range_said(claim, claim.bootstrap)}")
    return "\n".join(lines)


def number_said(claim: Claim, value: float | None) -> str:
    """With as many digits as the mean of the claim has."""
    return measured(value, like=claim.mean)


def range_said(claim: Claim, interval: tuple[float, float] | None) -> str:
    """`0.219 to 0.672`."""
    if interval is None:
        return DASH
    low, high = interval
    if math.isinf(low):
        return f"up to {number_said(claim, high)}"
    start = number_said(claim, low)
    return f"from {start}" if math.isinf(high) else f"{start} to {number_said(claim, high)}"


def threshold_said(claim: Claim) -> str:
    """`≥ 0.300`."""
    if claim.threshold is None:
        return DASH
    symbol = {1: "≥", -1: "≤", 0: claim.direction}[_side(claim)]
    return f"{symbol} {number_said(claim, claim.threshold)}".strip()


def _side(claim: Claim) -> int:
    """1: at least the threshold, -1: at most, 0: something else."""
    return _SIDES.get(claim.direction, 0)


def claims_figure(study: Study) -> Figure | None:
    """A strip a claim with an axis of its own: seeds, mean, interval and threshold."""
    shown = [claim for claim in study.claims if claim.mean is not None or claim.values]
    if not shown:
        return None
    heads = [_head(claim) for claim in shown]
    heights = [0.58 + 0.15 * len(head) for head in heads]

    def draw(canvas: "Canvas") -> None:
        axes_of = stacked(canvas, len(shown), height_ratios=heights)
        for claim, head, axes in zip(shown, heads, axes_of, strict=True):
            _draw_strip(axes, claim)
            axes.set_title("\n".join(head), fontsize=8.5, color=_INK[tone(claim)])

    said = (
        f"{(claim.says or claim.name).rstrip('.')}: "
        f"mean {number_said(claim, claim.mean)}, interval "
        f"{range_said(claim, claim.interval)}, threshold {threshold_said(claim)}, {claim.verdict}"
        for claim in shown
    )
    return Figure(
        name="claims",
        title="Claims and thresholds",
        caption="Each claim on an axis of its own. Dots are seeds, the diamond is their mean, the "
        "bar its interval, the dashed line the threshold; the shaded side is the one that the "
        "claim asks for.",
        alternative=f"A strip a claim. {'; '.join(said)}.",
        height=sum(heights),
        points=[mark for claim in shown for mark in _marks(claim)],
        draw=draw,
    )


def _head(claim: Claim) -> list[str]:
    return wrap(f"{verdict_said(claim)}: {claim.says or claim.name}", _LETTERS)


def _marks(claim: Claim) -> Iterator[Mark]:
    for seed, value in claim.values.items():
        if math.isfinite(value):
            yield Mark(claim=claim.name, what="seed", seed=seed, value=value)
    low, high = claim.interval or (None, None)
    named = (("mean", claim.mean), ("low", low), ("high", high), ("threshold", claim.threshold))
    for what, value in named:
        if value is not None and math.isfinite(value):
            yield Mark(claim=claim.name, what=what, seed="", value=value)


def _draw_strip(axes: "Axes", claim: Claim) -> None:
    marks = list(_marks(claim))
    values = [mark.value for mark in marks]
    margin = 0.12 * (max(values) - min(values)) or abs(values[0]) * 0.1 or 1.0
    left, right = min(values) - margin, max(values) + margin
    one = {mark.what: mark.value for mark in marks if mark.what != "seed"}
    if "threshold" in one:
        start = one["threshold"]
        end = {1: right, -1: left, 0: start}[_side(claim)]
        axes.axvspan(start, end, color="#e7eef5", linewidth=0, zorder=0)
        axes.axvline(start, color=GUIDE, linestyle=(0, (4, 3)), linewidth=1.2)
    if claim.interval is not None:
        low, high = one.get("low", left), one.get("high", right)
        axes.plot([low, high], [0, 0], color="#222222", linewidth=2, solid_capstyle="butt")
    seeds = [mark.value for mark in marks if mark.what == "seed"]
    look = {"linestyle": "none", "markeredgewidth": 0}
    axes.plot(seeds, [-0.55] * len(seeds), marker="o", color="#0072B2", alpha=0.7, **look)
    if "mean" in one:
        axes.plot([one["mean"]], [0], marker="D", color="#222222", markersize=6, **look)
    axes.set_xlim(left, right)
    axes.set_ylim(-1, 0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.tick_params(axis="x", labelsize=8)
