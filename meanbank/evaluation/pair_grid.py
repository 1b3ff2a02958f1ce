"""Sequences of key/value pairs by length and number of pairs: what recall tasks are made of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from meanbank.core.config import check_least
from meanbank.data import RecallConfig
from meanbank.data.recall import seeded
from meanbank.evaluation.base import Evaluation, Sample, Subject, check_seed

Setting = tuple[int, int]  # tokens, pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairGrid(Evaluation):
    """Share of queries whose value gets the highest logit, for each (length, pairs) of `grid`.

    For models of the recall source. sequences: of each setting; they depend on `seed`, length,
    pairs and their number only, so they are the same for all models.
    """

    grid: tuple[Setting, ...]
    sequences: int = 256
    seed: int = 0
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_least(self, 1, "sequences", "batch_size")
        check_seed(self.seed)
        if not self.grid or len(set(self.grid)) < len(self.grid):
            raise ValueError(f"grid needs distinct [length, pairs], got {list(self.grid)}")

    @property
    def batch(self) -> int:
        return self.batch_size

    def vocabulary(self, subject: Subject) -> RecallConfig:
        """That of the recall task the subject was trained on; ValueError where there was none."""
        if subject.recall is None:
            raise ValueError(
                f"{subject.name} was not trained on the recall source; {self.title} needs a run "
                "that was (data.source: recall)"
            )
        return subject.recall

    def prompt_lengths(self, subject: Subject) -> tuple[int, ...]:
        return tuple(sorted({length for length, _ in self.grid}))

    def samples(self, subject: Subject) -> list[Sample]:
        self.vocabulary(subject)
        return [
            Sample(
                id=f"{length}/{pairs}/{number}",
                content=(length, pairs, number),
                group=f"{length}/{pairs}",
                size=length,
            )
            for length, pairs in self.grid
            for number in range(self.sequences)
        ]

    def generator(self, length: int, pairs: int, number: int) -> torch.Generator:
        """Where the random numbers of one sequence come from."""
        return seeded(self.seed, length, pairs, number)

    def score(self, length: int, pairs: int) -> str:
        """The name of a setting's score."""
        return f"{self.title}@{length}/{pairs}"

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        cells: Sequence[dict[str, Any]] = results["grid"]
        return {self.score(cell["length"], cell["pairs"]): cell["accuracy"] for cell in cells}
