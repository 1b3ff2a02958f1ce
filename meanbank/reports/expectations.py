"""What the demo is expected to show, with the thresholds, and whether it did."""

from collections.abc import Iterator

from meanbank.reports.results import DemoResults, RecallArm
from meanbank.reports.tables import (
    CONTRAST,
    Row,
    Table,
    contrast_table,
    language_table,
    recall_table,
)
from meanbank.reports.wording import decimal, signed

EASY = (128, 12)
FULL_RECALL, GROWING_RECALL, GROWING_GAIN = 0.98, 0.95, 0.30


def demo_tables(results: DemoResults) -> tuple[Table, ...]:
    """Every table of the demo, in reading order."""
    tables = language_table(results), recall_table(results), contrast_table(results)
    return *tables, expectations_table(results)


def expectations_table(results: DemoResults) -> Table:
    """One row an expectation: the measured numbers, and yes, no or a dash where one is missing."""
    rows = [Row(cells=cells) for cells in (_beats_bigram(results), *_recall(results))]
    return Table(
        title="Expectations",
        meaning=(
            "What earlier measurements at this scale led to expect, with the thresholds set "
            "beforehand. Two seeds are few: a yes is a check of the set-up, not a proof.",
        ),
        columns=("Expectation", "Measured", "Holds"),
        rows=tuple(rows),
        text_columns=1,
    )


def _beats_bigram(results: DemoResults) -> tuple[str, str, str]:
    found = [arm.bits_per_byte for arm in results.language]
    bigram = results.bigram.bits_per_byte if results.bigram else None
    if bigram is None or any(value is None for value in found) or not found:
        return "Every language model beats the bigram (BPB)", decimal(None), decimal(None)
    worst = max(value for value in found if value is not None)
    measured = f"{decimal(worst)} < {decimal(bigram)}"
    return "Every language model beats the bigram (BPB)", measured, _holds(worst < bigram)


def _recall(results: DemoResults) -> Iterator[tuple[str, str, str]]:
    arms = {arm.name: arm for arm in results.recall}
    tokens, pairs = EASY
    for name, least in (("full", FULL_RECALL), ("kvm_sqrt", GROWING_RECALL)):
        arm = arms[name]
        claim = f"{arm.label}: recall at {tokens}/{pairs} of at least {least:.2f}, each seed"
        yield _judged(claim, [run.accuracy.get(EASY) for run in arm.runs], least, decimal)
    growing, fixed = arms["kvm_sqrt"], arms["kvm_fixed"]
    tokens, pairs = CONTRAST
    claim = f"{growing.label} minus {fixed.label}: at least {GROWING_GAIN:.2f} at {tokens}/{pairs}"
    yield _judged(claim, list(_gains(growing, fixed)), GROWING_GAIN, signed)


def _gains(growing: RecallArm, fixed: RecallArm) -> Iterator[float | None]:
    low = {run.seed: run.accuracy.get(CONTRAST) for run in fixed.runs}
    for run in growing.runs:
        high, base = run.accuracy.get(CONTRAST), low.get(run.seed)
        yield None if high is None or base is None else high - base


def _judged(claim: str, values: list, least: float, wording) -> tuple[str, str, str]:
    if not values or None in values:
        return claim, decimal(None), decimal(None)
    return claim, ", ".join(wording(value) for value in values), _holds(min(values) >= least)


def _holds(holds: bool) -> str:
    return "yes" if holds else "NO"
