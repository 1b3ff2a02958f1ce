"""Means with intervals over seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of those that are finite numbers; None where none is."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(found) / len(found) if found else None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over `count` values; `half_width` of its t interval is None for a single value."""

    mean: float
    half_width: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and 95 % t interval of values; None without any."""
    count = len(values)
    if count == 0:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean=mean, half_width=None, count=1)
    from scipy.special import stdtrit

    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean=mean, half_width=quantile * deviation / math.sqrt(count), count=count)
