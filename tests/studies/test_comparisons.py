"""Two arms item by item."""

import json

import numpy as np
import pytest
from scipy import stats

from meanbank.studies.comparisons import compare_arms
from meanbank.studies.report import compare_groups
from meanbank.studies.resolve import load_study
from meanbank.studies.verdicts import RunScores
from tests.studies.tiny_studies import SMALL, study_file


def run(arm, seed=0, tuning=False, **items):
    found = {
        score: {str(item): float(value) for item, value in enumerate(values)}
        for score, values in items.items()
    }
    return RunScores(arm=arm, seed=seed, tuning=tuning, scores={}, items=found)


def test_wins_losses_and_ties():
    high = [1] * 10 + [0] * 2 + [1] * 8
    low = [0] * 10 + [1] * 2 + [1] * 8
    (found,) = compare_arms([run("a", acc=high), run("b", acc=low)], "a", "b")
    assert (found.wins, found.losses, found.ties, found.items) == (10, 2, 8, 20)
    assert found.difference == pytest.approx(0.4)
    assert found.p == pytest.approx(2 * (1 + 12 + 66) / 2**12)  # 0, 1 or 2 of 12
    assert found.p == pytest.approx(stats.binomtest(2, 12).pvalue)
    assert found.interval.low < 0.4 < found.interval.high
    deviation = np.subtract(high, low).std() / np.sqrt(20)
    assert found.interval.high - found.interval.low == pytest.approx(3.92 * deviation, rel=0.1)
    assert (found.outcome, found.seeds) == ("higher", (0,))
    (turned,) = compare_arms([run("a", acc=high), run("b", acc=low)], "b", "a")
    assert (turned.wins, turned.losses, turned.outcome) == (2, 10, "lower")
    assert json.loads(json.dumps(found.plain()))["outcome"] == "higher"


def test_every_score_costs_certainty():
    clear, noise = ([1] * 10 + [0] * 2, [0] * 10 + [1] * 2), ([1, 0, 1, 1], [0, 1, 1, 1])
    first = run("a", clear=clear[0], noise=noise[0], same=noise[0])
    second = run("b", clear=clear[1], noise=noise[1], same=noise[0], other=[1, 1])
    found = {each.score: each for each in compare_arms([first, second], "a", "b")}
    assert list(found) == ["clear", "noise", "same"]
    assert found["clear"].p_holm == pytest.approx(3 * found["clear"].p)
    assert found["clear"].p < 0.05 < found["clear"].p_holm
    assert [each.outcome for each in found.values()] == ["undecided"] * 3
    assert (found["same"].p, found["same"].ties) == (1, 4)
    assert (found["same"].interval.low, found["same"].interval.high) == (0, 0)


def test_seeds_are_paired_and_an_item_counts_once():
    runs = [
        run("a", 0, acc=[1, 1, 1]),
        run("b", 0, acc=[0, 0, 1]),
        run("a", 1, acc=[1, 0, 1]),
        run("b", 1, acc=[0, 1, 1]),
        run("a", 2, acc=[1, 1, 1]),  # b has no such seed
        run("a", 3, tuning=True, acc=[0, 0, 0]),
        run("b", 3, acc=[1, 1, 1]),
        run("a", 4, acc=[1, float("nan"), 1]),
        run("b", 4, acc=[0, 0, 0]),
    ]
    (found,) = compare_arms(runs, "a", "b")
    assert found.seeds == (0, 1)
    assert (found.items, found.wins, found.losses, found.ties) == (3, 1, 0, 2)  # +2, +1 -1, 0
    assert found.difference == pytest.approx(1 / 3)


def test_nothing_to_compare():
    assert compare_arms([run("a", acc=[1])], "a", "b") == []
    with pytest.raises(ValueError, match="a and b have different items of acc at seed 0"):
        compare_arms([run("a", acc=[1]), run("b", acc=[1, 1])], "a", "b")


def test_groups_are_held_against_their_first_arm_or_their_reference(tmp_path):
    first = {"overrides": SMALL, "arms": {"a": "quick/recall_sqrt", "b": "quick/recall_fixed"}}
    others = {"overrides": SMALL, "reference": "b", "arms": {"c": "quick/recall_full"}}
    study = load_study(study_file(tmp_path, groups={"first": first, "others": others}))
    found = list(compare_groups(study, [run(name, acc=[0, 1]) for name in "abc"]))
    pairs = [(each["group"], each["first"], each["second"]) for each in found]
    assert pairs == [("first", "a", "b"), ("others", "b", "c")]


def test_arms_with_other_items_are_not_compared(tmp_path, capsys):
    arms = {name: "quick/recall_full" for name in "abc"}
    group = {"overrides": SMALL, "arms": arms}
    study = load_study(study_file(tmp_path, groups={"first": group}))
    found = list(
        compare_groups(study, [run("a", acc=[0, 1]), run("b", acc=[0]), run("c", acc=[1, 1])])
    )
    assert [(each["first"], each["second"]) for each in found] == [("a", "c")]
    assert "warning: a and b have different items of acc" in capsys.readouterr().err
