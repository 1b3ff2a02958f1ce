"""Two arms task by task: which answers more items, and how sure that is."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from meanbank.studies.statistics import Interval, holm, item_interval
from meanbank.studies.verdicts import LEVEL, RunScores

HIGHER, LOWER, EVEN = "higher", "lower", "undecided"


class DifferentItems(ValueError):
    """Arms were evaluated on other samples: nothing can be compared item by item."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The items of one score in two arms, at the seeds that both have.

    seeds: those seeds. items: how many; an item's value is its mean over them. wins, losses, ties:
    items at which the first arm's value is above, below, equal to the second's. difference: the
    mean of first less second, with a bootstrap interval over items. p: exact two-sided sign test
    of wins and losses (McNemar's where items are right or wrong); p_holm: adjusted over scores.
    An outcome other than `EVEN` needs p_holm < .05 and an interval without 0; it says nothing of
    other seeds.
    """

    score: str
    first: str
    second: str
    seeds: tuple[int, ...]
    items: int
    wins: int
    losses: int
    ties: int
    difference: float
    interval: Interval
    p: float
    p_holm: float

    @property
    def outcome(self) -> str:
        """Of the first arm: `HIGHER` or `LOWER`, or `EVEN`."""
        if self.p_holm < LEVEL and self.interval.low > 0:
            return HIGHER
        if self.p_holm < LEVEL and self.interval.high < 0:
            return LOWER
        return EVEN

    def plain(self) -> dict[str, Any]:
        """JSON values: all fields and `outcome`; the interval is {low, high, kind}."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds), "outcome": self.outcome}


def compare_arms(
    runs: Sequence[RunScores],
    first: str,
    second: str,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Comparison]:
    """Compare the items of every score that both arms have, in the order of the first one's.

    Tuning seeds do not count, nor do items that are not all numbers. A model that exists is
    compared with every seed of the other arm. Raises DifferentItems where
    the arms have different items of a score.
    """
    found = []
    for score in _scores(runs, first):
        seeds, differences = _differences(runs, first, second, score)
        if differences:
            interval = item_interval(differences, resamples=resamples, seed=seed)
            found.append(_comparison(score, (first, second), seeds, differences, interval))
    adjusted = holm([each.p for each in found])
    return [dataclasses.replace(each, p_holm=p) for each, p in zip(found, adjusted, strict=True)]


def _scores(runs: Sequence[RunScores], arm: str) -> list[str]:
    """Scores of an arm that have items, in order of first appearance."""
    return list(dict.fromkeys(score for run in runs if run.arm == arm for score in run.items))


def _differences(
    runs: Sequence[RunScores], first: str, second: str, score: str
) -> tuple[tuple[int, ...], list[float]]:
    """The seeds that both arms have, and first less second by item, a mean over these seeds."""
    left, right = (
        [run for run in runs if run.arm == arm and not run.tuning and _has_numbers(run, score)]
        for arm in (first, second)
    )
    pairs = {
        (one.seed if other.existing else other.seed): (one.items[score], other.items[score])
        for one in left
        for other in right
        if one.existing or other.existing or one.seed == other.seed
    }
    seeds = tuple(sorted(pairs))
    by_id: dict[str, list[float]] = {}
    for seed in seeds:
        high, low = pairs[seed]
        if high.keys() != low.keys():
            raise DifferentItems(
                f"{first} and {second} have different items of {score} at seed {seed}; "
                "evaluate them with the same settings"
            )
        for name, value in high.items():
            by_id.setdefault(name, []).append(value - low[name])
    return seeds, [sum(values) / len(values) for values in by_id.values()]


def _has_numbers(run: RunScores, score: str) -> bool:
    items = run.items.get(score, {})
    return bool(items) and all(map(math.isfinite, items.values()))


def _comparison(
    score: str,
    arms: tuple[str, str],
    seeds: tuple[int, ...],
    differences: Sequence[float],
    interval: Interval,
) -> Comparison:
    """The comparison of one score by itself, p not adjusted yet."""
    wins = sum(each > 0 for each in differences)
    losses = sum(each < 0 for each in differences)
    p = _sign_test(wins, losses)
    return Comparison(
        score=score,
        first=arms[0],
        second=arms[1],
        seeds=seeds,
        items=len(differences),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
        difference=sum(differences) / len(differences),
        interval=interval,
        p=p,
        p_holm=p,
    )


def _sign_test(wins: int, losses: int) -> float:
    """The exact two-sided p value of a split as uneven, were wins and losses as likely."""
    from scipy.special import bdtr  # the binomial's distribution function

    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))
