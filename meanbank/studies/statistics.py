"""What values over seeds and items tell: t intervals, bootstrap intervals, adjusted p values."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meanbank.studies.claims import Claim, Term

FEW_SEEDS = 6  # below it, seeds are not resampled: a bootstrap over three seeds means nothing
CONFIDENCE = 0.95

Items = Mapping[str, float]  # sample id -> value

_NUMBERS_AT_ONCE = 1 << 22  # drawn at once, to bound the memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """Both ends, and in words what it is an interval of."""

    low: float
    high: float
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedTest:
    """A claim's sum over seeds.

    sd: with n - 1; None for one seed. interval: a 95 % t interval of the mean; None for one seed
    and where the seeds do not differ. p: one-sided, of such values though the claim is false;
    p_against: though it is true. Both are None for one seed. note: what is particular, or empty.
    """

    n: int
    mean: float
    sd: float | None
    interval: Interval | None
    p: float | None
    p_against: float | None
    note: str = ""


def over_seeds(claim: Claim, values: Sequence[float]) -> SeedTest:
    """Test the mean of one value a seed against the claim's threshold.

    A t test of the mean. Where all seeds have one value there is no variance to go by; then a sign
    test: n seeds fall on one side by chance with probability 2^-n.
    """
    from scipy.special import stdtr, stdtrit  # Student's t: its distribution function and quantile

    n = len(values)
    if not n:
        raise ValueError("a test over seeds needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        note = "one seed: no interval"
        return SeedTest(n=n, mean=mean, sd=None, interval=None, p=None, p_against=None, note=note)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    if len(set(values)) == 1 or not sd:
        chance, is_met = 0.5**n, claim.is_met(values[0])
        return SeedTest(
            n=n,
            mean=values[0],
            sd=0.0,
            interval=None,
            p=chance if is_met else 1.0,
            p_against=1.0 if is_met else chance,
            note=f"all {n} seeds have one value: no interval, and p of a sign test",
        )
    error = sd / math.sqrt(n)
    reach = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * error
    t = (mean - claim.threshold) / error
    p, p_against = float(stdtr(n - 1, -t)), float(stdtr(n - 1, t))
    if not claim.is_lower_bound:
        p, p_against = p_against, p
    kind = f"95 % t interval over {n} seeds"
    interval = Interval(low=mean - reach, high=mean + reach, kind=kind)
    return SeedTest(n=n, mean=mean, sd=sd, interval=interval, p=p, p_against=p_against)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment: of m p values, the k-th smallest times m - k + 1, none below a smaller."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def bootstrap(
    terms: Mapping[Term, float],
    items: Mapping[int, Mapping[Term, Items]],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """A 95 % percentile interval of the mean over seeds of sum(coefficient * mean over items).

    items: by seed and term, {sample id: value}. The same ids are drawn for all arms, and for all
    scores and seeds that have the same ids: where models of all seeds answer the same questions,
    one draw of questions serves them all (a crossed, or pigeonhole, bootstrap; Owen 2007). Other
    seeds' items are drawn for each. From `FEW_SEEDS` seeds on the seeds are drawn, too.
    Raises ValueError where one score has other items in one arm than in another, or none.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    blocks = [_blocks(terms, items[each], each) for each in items]
    if not blocks:
        raise ValueError("a bootstrap needs the items of at least one seed")
    generator, count = np.random.default_rng(seed), len(blocks)
    if count < FEW_SEEDS:
        picks = np.tile(np.arange(count), (resamples, 1))
    else:
        picks = generator.integers(count, size=(resamples, count))
    drawn = np.zeros((resamples, count))  # the value of each picked seed
    if all(each.keys() == blocks[0].keys() for each in blocks):
        for ids in blocks[0]:
            values = np.stack([each[ids] for each in blocks], axis=1)
            drawn += np.take_along_axis(_means(values, resamples, generator), picks, axis=1)
    else:
        for index, each in enumerate(blocks):
            rows, columns = np.nonzero(picks == index)
            for values in each.values():
                drawn[rows, columns] += _means(values[:, None], len(rows), generator)[:, 0]
    return _percentiles(drawn.mean(axis=1), _kind(blocks))


def item_interval(differences: Sequence[float], *, resamples: int, seed: int = 0) -> Interval:
    """A 95 % percentile interval of the mean of one value an item, over draws of items."""
    values = np.asarray(differences, dtype=np.float64)[:, None]
    means = _means(values, resamples, np.random.default_rng(seed))[:, 0]
    return _percentiles(means, f"95 % bootstrap over {len(values)} items")


def _blocks(
    terms: Mapping[Term, float], found: Mapping[Term, Items], seed: int
) -> dict[tuple[str, ...], np.ndarray]:
    """By the sorted ids of a set of items, each item's part of the sum."""
    blocks, ids_of = {}, {}
    for (score, arm), coefficient in terms.items():
        values = found.get((score, arm))
        if not values:
            raise ValueError(f"{score}({arm}) has no items at seed {seed}")
        ids = tuple(sorted(values))
        if ids_of.setdefault(score, ids) != ids:
            raise ValueError(f"the arms have different items of {score} at seed {seed}")
        part = coefficient * np.array([values[each] for each in ids], dtype=np.float64)
        blocks[ids] = blocks[ids] + part if ids in blocks else part
    return blocks


def _means(values: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Means (resamples, seeds) of `values` (items, seeds) over items drawn with replacement."""
    count = len(values)
    parts = [
        _draws(rows, count, generator) @ values / count
        for rows in _pieces(resamples, max(1, _NUMBERS_AT_ONCE // count))
    ]
    return np.concatenate(parts) if parts else np.empty((0, values.shape[1]))


def _draws(rows: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """How often each of `count` items is drawn (rows, count), `count` draws a row."""
    numbers = generator.integers(count, size=(rows, count))
    numbers += count * np.arange(rows)[:, None]
    return np.bincount(numbers.ravel(), minlength=rows * count).reshape(rows, count).astype(float)


def _pieces(total: int, size: int) -> Iterator[int]:
    for start in range(0, total, size):
        yield min(size, total - start)


def _percentiles(means: np.ndarray, kind: str) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail)).round(12)  # sums of equal items are equal
    return Interval(low=float(low), high=float(high), kind=kind)


def _kind(blocks: Sequence[Mapping[tuple[str, ...], np.ndarray]]) -> str:
    counts = sorted({sum(map(len, each)) for each in blocks})
    shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if len(blocks) < FEW_SEEDS:
        seeds = "the seed" if len(blocks) == 1 else f"the {len(blocks)} seeds"
        return f"95 % bootstrap over {shown} items within {seeds} given"
    return f"95 % bootstrap over {len(blocks)} seeds and {shown} items"
