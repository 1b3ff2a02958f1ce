"""Verdicts on claims, worked out by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from meanbank.studies.verdicts import RULE, ClaimSpec, RunScores, judge

FEWER = "bpb(bank) - bpb(plain) < 0"


def runs_of(arm, values, *, score="bpb", tuning=()):
    return [
        RunScores(arm=arm, seed=seed, tuning=seed in tuning, scores={score: value})
        for seed, value in enumerate(values)
    ]


def pairs(differences, **more):
    base = [1.5 + 0.25 * seed for seed in range(len(differences))]
    lower = [value + difference for value, difference in zip(base, differences, strict=True)]
    return runs_of("plain", base, **more) + runs_of("bank", lower, **more)


def verdict_on(claim, runs, **more):
    (found,) = judge([ClaimSpec(claim=claim, **more)], runs)
    return found


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.3, -0.2, -0.4, -0.3, -0.2, -0.4], "holds"),
        ([0.3, 0.2, 0.4, 0.3, 0.2, 0.4], "does not hold"),
        ([-0.3, -0.2, -0.4, 0.3, 0.2, 0.4], "undecided"),
        ([-0.3, -0.2, -0.4, -0.3, -0.2], "suggestive: holds"),
        ([0.3, 0.2, 0.4], "suggestive: does not hold"),
        ([-0.3, 0.2, 0.4], "undecided"),
        ([-0.3, -0.3001], "undecided"),
        ([-0.3], "undecided"),
        ([-0.3] * 6, "holds"),  # a sign test: 1/64
        ([0.0] * 6, "does not hold"),
        ([-0.3] * 5, "undecided"),  # 1/32 is above .025
    ],
)
def test_words(differences, verdict):
    found = verdict_on(FEWER, pairs(differences))
    assert found.verdict == verdict
    assert list(found.values.values()) == pytest.approx(differences, abs=1e-12)
    assert found.seeds == tuple(range(len(differences)))
    assert found.satisfied == sum(value < 0 for value in differences)
    assert ("fewer than 3 seeds decide nothing" in found.notes) == (len(differences) < 3)


def test_numbers_are_of_paired_differences():
    differences = [-0.3, -0.2, -0.4, -0.3, -0.2, -0.5]
    found = verdict_on(FEWER, pairs(differences))
    expected = stats.ttest_1samp(differences, 0, alternative="less")
    both = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(differences))
    assert found.sd == pytest.approx(np.std(differences, ddof=1))
    assert found.p == found.p_holm == pytest.approx(expected.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(both))
    assert found.bootstrap is None
    assert (found.direction, found.threshold) == ("<", 0)


def test_a_p_below_5_percent_is_not_enough_while_the_interval_holds_the_threshold():
    found = verdict_on(FEWER, pairs([-0.9, -0.7, -0.5, -0.1, 0.1, 0.0]))
    assert 0.025 < found.p < 0.05
    assert found.interval.high > 0
    assert found.verdict == "undecided"


def test_every_claim_of_a_study_costs_certainty():
    differences = [-0.9, -0.7, -0.5, -0.1, 0.1, -0.3]
    runs = pairs(differences)
    alone = verdict_on(FEWER, runs)
    assert 0.01 < alone.p < 0.025
    assert alone.verdict == "holds"
    noise = ClaimSpec(claim="bpb(bank) - bpb(plain) < -0.35")
    each = ClaimSpec(claim="bpb(bank) < 9", each=True)
    missing = ClaimSpec(claim="bpb(none) < 9")
    both = judge([noise, each, ClaimSpec(claim=FEWER), missing, noise], runs)
    assert [found.p_holm is None for found in both] == [False, True, False, True, False]
    assert both[2].p == alone.p
    assert both[2].p_holm == pytest.approx(3 * alone.p)
    assert both[0].p_holm == both[4].p_holm == pytest.approx(min(1, 2 * both[0].p))
    assert both[2].verdict == ("holds" if 3 * alone.p < 0.05 else "undecided")
    assert 3 * alone.p > 0.05


@pytest.mark.parametrize(
    ("values", "verdict", "satisfied"),
    [
        ([0.99, 1, 1, 1, 0.981, 1], "holds", 6),
        ([0.99, 1, 1, 1, 0.979, 1], "does not hold", 5),
        ([0.99, 1, 1], "suggestive: holds", 3),
        ([0.5, 1, 1], "suggestive: does not hold", 2),
        ([1, 1], "undecided", 2),
    ],
)
def test_each_seed_by_itself(values, verdict, satisfied):
    found = verdict_on("bpb(a) >= 0.98", runs_of("a", values), each=True)
    assert (found.verdict, found.satisfied, found.each) == (verdict, satisfied, True)
    assert (found.mean, found.interval, found.bootstrap, found.p) == (None,) * 4


def test_tuning_seeds_stand_apart():
    runs = pairs([0.3, -0.3, -0.2, -0.4, -0.3, -0.2, -0.4])
    found = verdict_on(FEWER, runs)
    assert found.verdict == "undecided"
    # A seed that one arm was tuned on does not count for the pair.
    tuned = [dataclasses.replace(run, tuning=(run.arm, run.seed) == ("bank", 0)) for run in runs]
    found = verdict_on(FEWER, tuned)
    assert found.verdict == "holds"
    assert found.seeds == (1, 2, 3, 4, 5, 6)
    assert found.tuning_values == {0: pytest.approx(0.3)}
    found = verdict_on("bpb(bank) < 9", runs_of("bank", [1, 2], tuning=(0, 1)))
    assert (found.verdict, found.notes) == (
        "not measured",
        ("there are runs of tuning seeds only",),
    )


def test_what_is_missing_is_told():
    runs = pairs([-0.3, -0.2, -0.4, -0.3])
    failed = [run for run in runs if (run.arm, run.seed) not in {("bank", 1), ("bank", 3)}]
    found = verdict_on(FEWER, failed)
    assert found.verdict == "not measured"
    assert found.notes == ("bpb(bank) is missing at seeds 1, 3",)
    assert list(found.values) == [0, 2]
    assert (found.mean, found.interval, found.p, found.p_holm) == (None,) * 4
    no_scores = [*failed, RunScores(arm="bank", seed=1, scores={})]
    diverged = [*no_scores, RunScores(arm="bank", seed=3, scores={"bpb": math.nan})]
    assert verdict_on(FEWER, diverged).notes == found.notes
    found = verdict_on("bpb(bank) - loss(plain) + loss(bnak) < 0", runs)
    assert found.notes == ("there is no run of bnak",)
    found = verdict_on("bpb(bank) - loss(plain) < 0", runs, each=True)
    assert found.verdict == "not measured"
    assert found.notes == ("loss(plain) is missing at seeds 0, 1, 2, 3",)


def test_refusals():
    with pytest.raises(ValueError, match="claim 'bpb > 1', at character 5"):
        ClaimSpec(claim="bpb > 1")
    with pytest.raises(ValueError, match="two runs of arm 'a' have seed 0"):
        judge([], [*runs_of("a", [1, 2]), *runs_of("a", [1, 2])])
    assert judge([], []) == []


def answered(arm, right, *, count, score="acc"):
    """One run a seed with `right` of `count` items right, the first ones."""
    return [
        RunScores(
            arm=arm,
            seed=seed,
            scores={score: each / count},
            items={score: {str(item): float(item < each) for item in range(count)}},
        )
        for seed, each in enumerate(right)
    ]


def test_an_accuracy_has_to_be_clear_over_items_too():
    claim = "acc(a) - acc(b) > 0.1"
    few = answered("a", [5, 5, 5, 5, 4, 5], count=8) + answered("b", [4] * 5 + [3], count=8)
    found = verdict_on("acc(a) - acc(b) > 0", few)
    assert found.interval.low > 0  # five of six seeds have one item more
    assert found.p_holm < 0.025
    assert found.bootstrap.low <= 0  # which is one item of eight, always the same
    assert found.verdict == "undecided"
    assert verdict_on("acc(a) - acc(b) <= 0", few).verdict == "undecided"
    many = answered("a", [500, 505, 510, 490, 495, 500], count=800)
    many += answered("b", [350, 360, 340, 350, 355, 345], count=800)
    found = verdict_on(claim, many)
    assert found.bootstrap.low > 0.1
    assert found.bootstrap.kind == "95 % bootstrap over 6 seeds and 800 items"
    assert found.verdict == "holds"
    assert verdict_on("acc(a) - acc(b) < 0.1", many).verdict == "does not hold"


def test_a_ceiling_is_told():
    found = verdict_on("acc(a) >= 1", answered("a", [8] * 6, count=8))
    assert found.verdict == "holds"
    assert found.p == 1 / 64
    assert len(found.notes) == 2
    assert "sign test" in found.notes[0]
    assert "the bootstrap interval is a point" in found.notes[1]


def test_no_bootstrap_of_what_items_do_not_tell():
    runs = answered("a", [4, 5, 6], count=8) + runs_of("b", [0.1, 0.2, 0.1], score="acc")
    found = verdict_on("acc(a) - acc(b) > 0", runs)
    assert found.bootstrap is None
    assert found.notes == ("no bootstrap: acc(b) has no items at seed 0",)
    others = answered("a", [4, 5, 6], count=8) + answered("b", [1, 2, 2], count=9)
    assert verdict_on("acc(a) - acc(b) > 0", others).notes == (
        "no bootstrap: the arms have different items of acc at seed 0",
    )
    wrong = [
        dataclasses.replace(run, scores={"acc": run.scores["acc"] + 0.25 * (run.seed == 2)})
        for run in answered("a", [4, 5, 4], count=8)
    ]
    assert verdict_on("acc(a) > 0", wrong).notes == (
        "no bootstrap: acc(a) at seed 2 is 0.75, its items' mean 0.5",
    )


def test_plain_values():
    runs = answered("a", [4, 5, 6], count=8)
    spec = ClaimSpec(claim="acc(a) > 0.1", says="It learns.", source="table 2", expected="yes")
    (found,) = judge([spec], runs, resamples=100, seed=3)
    plain = json.loads(json.dumps(found.plain(), allow_nan=False))
    assert plain == found.plain()
    assert plain["values"] == {"0": 0.5, "1": 0.625, "2": 0.75}
    assert plain["seeds"] == [0, 1, 2]
    assert (plain["says"], plain["source"], plain["expected"]) == ("It learns.", "table 2", "yes")
    assert set(plain["interval"]) == set(plain["bootstrap"]) == {"low", "high", "kind"}
    assert plain["verdict"] == "suggestive: holds"
    assert judge([spec], runs, resamples=100, seed=3) == [found]
    assert "does not hold" in RULE


values = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 1e-300, 1e50]))


@given(st.lists(st.tuples(values, values), max_size=8), st.booleans())
def test_plain_values_are_finite_whatever_the_scores(scores, each):
    runs = runs_of("a", [first for first, _ in scores]) + runs_of("b", [last for _, last in scores])
    for claim in ("bpb(a) - bpb(b) > 0", "2 * bpb(a) <= 1"):
        json.dumps(verdict_on(claim, runs, each=each).plain(), allow_nan=False)
