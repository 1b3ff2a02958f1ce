"""Parts of a run whose sequences have lengths of their own."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LengthStage:
    """A part of a run on text: `fraction` of the steps, with rows of `length` tokens."""

    fraction: float
    length: int


@dataclass(frozen=True, kw_only=True)
class BatchStage:
    """`steps` steps in a row whose batches have `rows` rows of `length` tokens."""

    steps: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Of all its steps."""
        return self.steps * self.rows * self.length


def check_fractions(fractions: Sequence[float], of: str) -> None:
    """Raises ValueError unless they are positive with sum 1; of: what they are fractions of."""
    if min(fractions) <= 0 or not math.isclose(sum(fractions), 1, abs_tol=1e-6):
        raise ValueError(f"the fractions of {of} must be positive with sum 1, got {fractions}")


def stage_ends(fractions: Sequence[float], steps: int) -> list[int]:
    """The step before which each stage ends, in a run of `steps` steps."""
    return [round(share * steps) for share in itertools.accumulate(fractions)]


def stage_at(ends: Sequence[int], step: int) -> int:
    """The number of the stage that a step, counted from 0, is in; after the last step the last."""
    return next((number for number, end in enumerate(ends) if step < end), len(ends) - 1)


def check_lengths(stages: Sequence[LengthStage], sequence_length: int) -> None:
    """Raises ValueError unless the stages cut rows of `sequence_length` tokens, and end in them."""
    name = "data.sequence_lengths"
    check_fractions([stage.fraction for stage in stages], name)
    for stage in stages:
        if stage.length < 1 or sequence_length % stage.length:
            fitting = [n for n in range(1, sequence_length + 1) if sequence_length % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - stage.length))
            raise ValueError(
                f"a length of {name} must divide data.sequence_length ({sequence_length}), got "
                f"{stage.length}; the nearest that does is {nearest}"
            )
    if stages[-1].length != sequence_length:
        raise ValueError(
            f"the last length of {name} must be data.sequence_length ({sequence_length}), got "
            f"{stages[-1].length}; change one of them, or add a stage"
        )
