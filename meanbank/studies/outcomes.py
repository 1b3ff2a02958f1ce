"""Verdicts in an overview's words, which tell a small effect from none and from its reverse."""

from meanbank.studies.claims import parse_claim
from meanbank.studies.statistics import FEW_SEEDS
from meanbank.studies.verdicts import (
    DOES_NOT_HOLD,
    FEWEST_SEEDS,
    HOLDS,
    NOT_MEASURED,
    SUGGESTIVE,
    UNDECIDED,
    Verdict,
)

NOT_SEEN = "not seen"
SIZE_UNDECIDED = "seen, size undecided"
SMALLER = "smaller than claimed"
REVERSED = "reversed"
NOT_IN_EVERY_SEED = "not in every seed"

# What each outcome means, for readers. An interval is that of the mean, not adjusted for the number
# of claims; of a claim about each seed, from the lowest seed to the highest.
_DIFFERENCE = "of a difference of arms: "
OUTCOMES = {
    HOLDS: "by the rule of its study.",
    NOT_SEEN: f"{_DIFFERENCE}it does not hold or is undecided, and the interval includes 0.",
    SIZE_UNDECIDED: f"{_DIFFERENCE}undecided, but the interval is on the claimed side of 0, while "
    "the threshold is further out.",
    SMALLER: f"{_DIFFERENCE}it does not hold, but the interval is on the claimed side of 0.",
    REVERSED: f"{_DIFFERENCE}it does not hold, and the interval is on the other side of 0.",
    DOES_NOT_HOLD: "not a difference, or one that may go that far against the claim.",
    NOT_IN_EVERY_SEED: "a claim about each seed that does not hold in all, nor is reversed in all.",
    NOT_MEASURED: "a score is missing.",
    UNDECIDED: f"fewer than {FEWEST_SEEDS} seeds; or undecided, and not a difference or one on the "
    "claimed side of 0, which is not certain enough among so many claims or so few items.",
    f"{SUGGESTIVE}...": f"the same, with fewer than {FEW_SEEDS} seeds.",
}


def outcome(verdict: Verdict) -> str:
    """One of `OUTCOMES`, maybe after `SUGGESTIVE`."""
    word = verdict.verdict.removeprefix(SUGGESTIVE)
    count = len(verdict.values)
    if word == UNDECIDED and count >= FEWEST_SEEDS:
        claimed = UNDECIDED if verdict.threshold == 0 else SIZE_UNDECIDED
        word = {None: UNDECIDED, 1: claimed}.get(_side(verdict), NOT_SEEN)
    elif word == DOES_NOT_HOLD:
        word = _fallen(verdict)
    few = FEWEST_SEEDS <= count < FEW_SEEDS  # with fewer, what is decided is of models as they are
    few = few and word not in (NOT_SEEN, UNDECIDED, NOT_MEASURED)
    return f"{SUGGESTIVE * few}{word}"


def _fallen(verdict: Verdict) -> str:
    """Of a claim that does not hold."""
    side = _side(verdict)
    if verdict.each:
        return REVERSED if side == -1 else NOT_IN_EVERY_SEED
    return {1: SMALLER, 0: NOT_SEEN, -1: REVERSED, None: DOES_NOT_HOLD}[side]


def _side(verdict: Verdict) -> int | None:
    """1, -1: the claimed side of 0, the other one; 0: the interval includes it.

    None where 0 is nothing particular: no difference, or the claim holds at 0 and beyond it.
    """
    claim = parse_claim(verdict.claim)
    sign = 1 if claim.is_lower_bound else -1
    if not claim.is_difference or sign * claim.threshold < 0:
        return None
    if verdict.interval is not None:
        ends = [verdict.interval.low, verdict.interval.high]
    else:  # about each seed, or all seeds have one value
        ends = list(verdict.values.values())
    if all(sign * end > 0 for end in ends):
        return 1
    return -1 if all(sign * end < 0 for end in ends) else 0
