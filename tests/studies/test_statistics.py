"""Intervals and p values, against worked numbers and scipy's own functions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from meanbank.studies.claims import parse_claim
from meanbank.studies.statistics import bootstrap, holm, item_interval, over_seeds

MORE, LESS = parse_claim("a(x) > 0.5"), parse_claim("a(x) <= 0.5")


def test_three_seeds_by_hand():
    # Student's t with 2 degrees of freedom has F(t) = 1/2 + t / (2 sqrt(2 + t^2)).
    found = over_seeds(MORE, [1.0, 2.0, 3.0])
    t = 1.5 * math.sqrt(3)
    assert (found.n, found.mean, found.sd) == (3, 2, 1)
    assert found.p == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t**2)), rel=1e-12)
    assert found.p_against == pytest.approx(1 - found.p, rel=1e-12)
    assert found.interval.low == pytest.approx(2 - 4.30265273 / math.sqrt(3), rel=1e-9)
    assert found.interval.high == pytest.approx(2 + 4.30265273 / math.sqrt(3), rel=1e-9)
    assert found.interval.kind == "95 % t interval over 3 seeds"
    assert over_seeds(LESS, [1.0, 2.0, 3.0]).p == found.p_against


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=12, unique=True))
def test_as_scipy(numbers):
    values = [number / 64 for number in numbers]
    for claim, alternative in ((MORE, "greater"), (LESS, "less")):
        found = over_seeds(claim, values)
        expected = stats.ttest_1samp(values, 0.5, alternative=alternative)
        assert found.p == pytest.approx(expected.pvalue, rel=1e-9, abs=1e-300)
        both = stats.ttest_1samp(values, 0.5).confidence_interval(0.95)
        assert (found.interval.low, found.interval.high) == pytest.approx(tuple(both), rel=1e-9)
        clear = found.interval.low > 0.5 if claim is MORE else found.interval.high < 0.5
        assert clear == (found.p < 0.025)


def test_one_seed_has_no_interval():
    found = over_seeds(MORE, [0.7])
    assert (found.mean, found.sd, found.interval, found.p, found.p_against) == (
        0.7, None, None, None, None,
    )  # fmt: skip
    assert found.note == "one seed: no interval"
    with pytest.raises(ValueError, match="at least one value"):
        over_seeds(MORE, [])


@pytest.mark.parametrize(
    ("claim", "value", "p", "against"),
    [(MORE, 0.7, 1 / 64, 1.0), (MORE, 0.5, 1.0, 1 / 64), (LESS, 0.5, 1 / 64, 1.0)],
)
def test_equal_seeds_have_a_sign_test(claim, value, p, against):
    found = over_seeds(claim, [value] * 6)
    assert (found.mean, found.sd, found.interval) == (value, 0.0, None)
    assert (found.p, found.p_against) == (p, against)
    assert "no interval" in found.note


def test_a_t_interval_covers_the_mean_as_often_as_it_says():
    generator, covered, count = np.random.default_rng(0), 0, 4000
    for values in generator.normal(0.3, 2.0, size=(count, 5)):
        interval = over_seeds(MORE, values.tolist()).interval
        covered += interval.low < 0.3 < interval.high
    assert abs(covered / count - 0.95) < 4 * math.sqrt(0.95 * 0.05 / count)


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        ([], []),
        ([0.02], [0.02]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # 4 x .005, 3 x .01, 2 x .03
        ([0.01, 0.02, 0.03], [0.03, 0.04, 0.04]),
        ([0.5, 0.9, 0.4], [1.0, 1.0, 1.0]),
        ([0.01, 0.01], [0.02, 0.02]),
    ],
)
def test_holm_by_hand(p_values, adjusted):
    assert holm(p_values) == pytest.approx(adjusted, rel=1e-12)


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.999))
def test_holm_rejects_what_its_steps_do(p_values, level):
    rejected, left = set(), sorted(range(len(p_values)), key=p_values.__getitem__)
    while left and p_values[left[0]] * len(left) < level:  # Holm 1979, step by step
        rejected.add(left.pop(0))
    assert {index for index, p in enumerate(holm(p_values)) if p < level} == rejected


def items_of(seeds, *, arms="x", own_ids=False):
    """Items of score `a` from arrays (seeds, items) or (arms, seeds, items)."""
    values = np.asarray(seeds, dtype=float).reshape(len(arms), *np.shape(seeds)[-2:])
    return {
        seed: {
            ("a", arm): {
                f"{seed if own_ids else 0}-{item}": value
                for item, value in enumerate(values[index, seed])
            }
            for index, arm in enumerate(arms)
        }
        for seed in range(values.shape[1])
    }


ONE = {("a", "x"): 1.0}


def width(interval):
    return interval.high - interval.low


def test_two_items_by_hand():
    found = bootstrap(ONE, items_of([[0, 1]]))  # means 0, 1/2, 1 with chances 1/4, 1/2, 1/4
    assert (found.low, found.high) == (0, 1)
    assert found.kind == "95 % bootstrap over 2 items within the seed given"


def test_items_of_one_seed_as_scipy():
    values = np.random.default_rng(3).random(80)
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    for found in (
        bootstrap(ONE, items_of([values]), resamples=20_000),
        item_interval(values, resamples=20_000),
    ):
        assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.004)


def test_arms_answer_the_same_items():
    generator = np.random.default_rng(0)
    first = (generator.random((3, 200)) < 0.5).astype(float)
    terms = {("a", "x"): 1.0, ("a", "y"): -1.0}
    same = bootstrap(terms, items_of([first, first], arms="xy"))
    assert (same.low, same.high) == (0, 0)
    second = first.copy()
    second[:, :20] = 0  # only a tenth of the items can differ
    paired = bootstrap(terms, items_of([first, second], arms="xy"))
    differences = (first - second).mean(axis=0)
    assert width(paired) == pytest.approx(2 * 1.96 * differences.std() / math.sqrt(200), rel=0.08)


def test_order_of_items_is_no_matter():
    items = items_of([[[0, 1, 1, 0, 1]] * 3, [[1, 1, 0, 0, 1]] * 3], arms="xy")
    turned = {
        seed: {term: dict(reversed(found.items())) for term, found in terms.items()}
        for seed, terms in items.items()
    }
    terms = {("a", "x"): 1.0, ("a", "y"): -1.0}
    assert bootstrap(terms, items) == bootstrap(terms, turned)
    assert bootstrap(terms, items, seed=1) == bootstrap(terms, items, seed=1)


def test_items_that_seeds_share_are_drawn_once():
    values = np.random.default_rng(0).random(300)
    one = width(bootstrap(ONE, items_of([values])))
    shared = width(bootstrap(ONE, items_of([values] * 4)))  # four models alike are one
    own = width(bootstrap(ONE, items_of([values] * 4, own_ids=True)))  # four sets of items
    assert shared == pytest.approx(one, rel=0.06)
    assert own == pytest.approx(one / 2, rel=0.06)


def test_scores_with_the_same_items_are_drawn_together():
    values = np.random.default_rng(0).random((2, 100)).tolist()
    items = items_of(values)
    for found in items.values():
        found["b", "x"] = {item: 1 - value for item, value in found["a", "x"].items()}
    found = bootstrap({("a", "x"): 1.0, ("b", "x"): 1.0}, items)
    assert (found.low, found.high) == (1, 1)
    for found in items.values():
        found["b", "x"] = {f"b{item}": value for item, value in found["b", "x"].items()}
    apart = bootstrap({("a", "x"): 1.0, ("b", "x"): 1.0}, items)
    single = bootstrap({("a", "x"): 1.0}, items)
    assert width(apart) == pytest.approx(math.sqrt(2) * width(single), rel=0.06)


@pytest.mark.parametrize("own_ids", [False, True])
def test_six_seeds_are_drawn_as_well(own_ids):
    means = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.9])
    found = bootstrap(ONE, items_of(np.tile(means[:, None], 50), own_ids=own_ids))
    expected = stats.bootstrap(
        (means,), np.mean, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.02)
    assert found.kind == "95 % bootstrap over 6 seeds and 50 items"
    fewer = bootstrap(ONE, items_of(np.tile(means[:5, None], 50), own_ids=own_ids))
    assert (fewer.low, fewer.high) == (0.3, 0.3)
    assert fewer.kind == "95 % bootstrap over 50 items within the 5 seeds given"


@pytest.mark.parametrize("own_ids", [False, True])
def test_seeds_and_items_one_draw_at_a_time(own_ids):
    """Against the same bootstrap written as loops."""
    values = (np.random.default_rng(5).random((7, 12)) < 0.6).astype(float)
    found = bootstrap(ONE, items_of(values, own_ids=own_ids), resamples=20_000)
    generator, means = np.random.default_rng(9), []
    for _ in range(6000):
        drawn = generator.integers(12, size=12)
        total = 0.0
        for _ in range(7):
            seed = generator.integers(7)
            if own_ids:
                drawn = generator.integers(12, size=12)
            total += values[seed, drawn].mean() / 7
        means.append(total)
    assert found.low == pytest.approx(np.quantile(means, 0.025), abs=0.012)
    assert found.high == pytest.approx(np.quantile(means, 0.975), abs=0.012)


def test_sets_of_different_sizes():
    items = {0: {("a", "x"): {"0": 1.0}}, 1: {("a", "x"): {"1": 0.0, "2": 0.0}}}
    found = bootstrap(ONE, items)
    assert (found.low, found.high) == (0.5, 0.5)
    assert found.kind == "95 % bootstrap over 1 to 2 items within the 2 seeds given"


def test_many_items_in_pieces(monkeypatch):
    values = np.random.default_rng(0).random((2, 40))
    whole = bootstrap(ONE, items_of(values), resamples=500)
    monkeypatch.setattr("meanbank.studies.statistics._NUMBERS_AT_ONCE", 130)
    pieces = bootstrap(ONE, items_of(values), resamples=500)
    assert (pieces.low, pieces.high) == pytest.approx((whole.low, whole.high), abs=1e-12)


def test_refusals():
    terms = {("a", "x"): 1.0, ("a", "y"): -1.0}
    items = {3: {("a", "x"): {"0": 1.0}, ("a", "y"): {"1": 1.0}}}
    with pytest.raises(ValueError, match="different items of a at seed 3"):
        bootstrap(terms, items)
    with pytest.raises(ValueError, match=r"a\(y\) has no items at seed 3"):
        bootstrap(terms, {3: {("a", "x"): {"0": 1.0}}})
    with pytest.raises(ValueError, match="at least one seed"):
        bootstrap(terms, {})
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        bootstrap(ONE, items, resamples=0)
