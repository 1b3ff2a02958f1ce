"""Outcomes of claims, from differences between two arms."""

import pytest

from meanbank.studies.outcomes import OUTCOMES, outcome
from meanbank.studies.verdicts import SUGGESTIVE, ClaimSpec, RunScores, judge

UP, DOWN = [0.5, 0.6] * 3, [-0.5, -0.6] * 3  # t intervals .49 to .61
ACROSS, SMALL = [-0.1, 0.1] * 3, [0.1, 0.2] * 3  # -.11 to .11, .09 to .21

CASES = [
    ("x(a) - x(b) > 0", UP, "holds"),
    ("x(a) - x(b) > 0", UP[:3], "suggestive: holds"),
    ("x(a) - x(b) > 0", ACROSS, "not seen"),
    ("x(a) - x(b) > 0", ACROSS[:3], "not seen"),
    ("x(a) - x(b) > 0", DOWN, "reversed"),
    ("x(a) - x(b) > 0", DOWN[:3], "suggestive: reversed"),
    ("x(a) - x(b) < 0", UP, "reversed"),
    ("x(b) > x(a)", UP, "reversed"),
    ("x(a) - x(b) > 0", [-0.1] * 6, "reversed"),  # one value: no interval
    ("x(a) - x(b) > 0.3", DOWN, "reversed"),
    ("x(a) - x(b) > 0.55", UP, "seen, size undecided"),
    ("x(a) - x(b) > 0.55", UP[:3], "suggestive: seen, size undecided"),
    ("x(b) - x(a) <= -0.55", UP, "seen, size undecided"),
    ("x(a) - x(b) > 0.3", SMALL, "smaller than claimed"),
    ("x(a) - x(b) > 0.3", ACROSS, "not seen"),  # it does not hold, and 0 is in the interval
    ("x(a) - x(b) > 0.05", ACROSS, "not seen"),
    ("x(a) >= 3", UP, "does not hold"),
    ("x(a) <= 3", UP, "holds"),
    ("x(a) >= 1.6", ACROSS, "undecided"),  # no difference that could be seen
    ("x(a) >= 1.0", [0.1] * 3, "undecided"),
    ("x(a) > 2 * x(b)", DOWN, "does not hold"),  # not 0 where scores are equal
    ("x(a) - x(b) > -0.05", DOWN, "does not hold"),  # equal arms satisfy it
    ("x(a) - x(b) > -0.05", UP, "holds"),
    ("x(a) - x(b) > 0", UP[:2], "undecided"),
    ("x(a) - y(b) > 0", UP, "not measured"),
]
EACH = [
    ("x(a) - x(b) > 0", UP, "holds"),
    ("x(a) - x(b) > 0", [*UP[:5], -0.1], "not in every seed"),
    ("x(a) - x(b) > 0", [*DOWN[:2], 0.1], "suggestive: not in every seed"),
    ("x(a) - x(b) > 0", DOWN, "reversed"),
    ("x(a) >= 3", UP, "not in every seed"),
]


def found(claim, differences, **more):
    runs = [
        RunScores(arm=arm, seed=seed, scores={"x": score})
        for seed, difference in enumerate(differences)
        for arm, score in (("a", 1.5 + difference), ("b", 1.5))
    ]
    (verdict,) = judge([ClaimSpec(claim=claim, **more)], runs)
    return outcome(verdict)


@pytest.mark.parametrize(("claim", "differences", "expected"), CASES)
def test_an_outcome_tells_small_from_none_and_reversed(claim, differences, expected):
    assert found(claim, differences) == expected


@pytest.mark.parametrize(("claim", "differences", "expected"), EACH)
def test_of_claims_about_each_seed(claim, differences, expected):
    assert found(claim, differences, each=True) == expected


@pytest.mark.parametrize(
    ("claim", "expected"),
    [("x(a) > 0.5", "holds"), ("x(a) - x(b) > 0", "holds"), ("x(b) > x(a)", "reversed")],
)
def test_one_value_of_models_as_they_are_is_not_few_seeds(claim, expected):
    """The page of its study says the same."""
    runs = [
        RunScores(arm=arm, seed=0, existing=True, scores={"x": score})
        for arm, score in (("a", 0.9), ("b", 0.4))
    ]
    (verdict,) = judge([ClaimSpec(claim=claim, each=True)], runs)
    assert not verdict.verdict.startswith(SUGGESTIVE)
    assert outcome(verdict) == expected


def test_there_is_a_word_of_each_and_none_besides():
    seen = {expected.removeprefix(SUGGESTIVE) for _, _, expected in CASES + EACH}
    assert seen | {f"{SUGGESTIVE}..."} == OUTCOMES.keys()


def test_what_is_on_the_claimed_side_but_for_holms_adjustment_is_undecided():
    """The interval of one claim of many is above 0, the adjusted p value is not below .05."""
    runs = [
        RunScores(arm=arm, seed=seed, scores={"x": score, "y": -score})
        for seed, difference in enumerate([0.1, 0.3, 0.02, 0.25, 0.05, 0.3])
        for arm, score in (("a", difference), ("b", 0.0))
    ]
    wrong = [ClaimSpec(claim=f"y(a) > y(b) + 0.{k}") for k in range(9)]
    first, *_ = judge([ClaimSpec(claim="x(a) - x(b) > 0"), *wrong], runs)
    assert first.interval is not None and first.interval.low > 0
    assert first.p is not None and first.p < 0.025 and first.verdict == "undecided"
    assert outcome(first) == "undecided"
