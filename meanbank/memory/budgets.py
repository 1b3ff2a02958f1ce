"""Budgets: how many rows a growing memory may have after a number of tokens seen."""

import abc
import dataclasses
import math
from typing import ClassVar

from meanbank.core.config import Tagged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(Tagged, kind="budget"):
    """Rows as a function of all tokens seen (KVM paper, section 3.3).

    Called with the tokens seen it returns the rows wanted; the operator then limits them to the
    tokens that have left the window and never takes rows away.

    min_rows: never fewer; cap: never more (null: no cap).
    size_setting: the one number that scales the rows; None where there is none.
    """

    size_setting: ClassVar[str | None] = None

    min_rows: int = 0
    cap: int | None = None

    def __post_init__(self) -> None:
        if self.min_rows < 0:
            raise ValueError(f"min_rows must not be negative, got {self.min_rows}")
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"cap must be at least 1 (or null), got {self.cap}")

    @abc.abstractmethod
    def rows(self, seen: int) -> int: ...

    def __call__(self, seen: int) -> int:
        rows = max(self.rows(seen), self.min_rows)
        return rows if self.cap is None else min(rows, self.cap)


def _round_down(rows: int, multiple: int) -> int:
    return rows - rows % multiple


def _positive(**settings: float) -> None:
    for name, value in settings.items():
        if not value > 0 or not math.isfinite(value):
            raise ValueError(f"{name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(Budget, tag="fixed"):
    """Always `count` rows (but at least the first chunk's)."""

    size_setting: ClassVar[str | None] = "count"

    count: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(count=self.count)

    def rows(self, seen: int) -> int:
        return self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerLaw(Budget, tag="power_law"):
    """`factor * seen ** exponent`, rounded down to a multiple of `multiple`."""

    size_setting: ClassVar[str | None] = "factor"

    factor: float = 16.0
    exponent: float = 0.5
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(factor=self.factor, exponent=self.exponent, multiple=self.multiple)
        if self.exponent > 1:
            raise ValueError(f"exponent must be at most 1, got {self.exponent}")

    def rows(self, seen: int) -> int:
        rows = min(seen, self.factor * seen**self.exponent)  # never more than there are tokens
        return _round_down(math.floor(rows), self.multiple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saturating(Budget, tag="saturating"):
    """`limit * seen / (limit + seen)`, rounded down to a multiple of `multiple`."""

    size_setting: ClassVar[str | None] = "limit"

    limit: int = 1024
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(limit=self.limit, multiple=self.multiple)

    def rows(self, seen: int) -> int:
        return _round_down(self.limit * seen // (self.limit + seen), self.multiple)
