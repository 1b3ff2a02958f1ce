"""Associative recall: accuracy by length and number of pairs."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from meanbank.data import IGNORED, Filler, RecallConfig, recall_batch
from meanbank.data.recall import check_room
from meanbank.evaluation.base import (
    Evaluation,
    Record,
    Sample,
    Subject,
    check_seed,
    mean_scores,
    prompt_hash,
)

Setting = tuple[int, int]  # tokens, pairs
GRID: tuple[Setting, ...] = ((128, 12), (512, 12), (1024, 12), (128, 24), (512, 48))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Evaluation, tag="recall"):
    """Share of queries whose value gets the highest logit, for each (length, pairs) of `grid`.

    filler: what stands between the pairs, see `meanbank.data.Stage`. sequences: of each setting.
    seed: of the sequences, which are the same for all models; the default is far from those of
    training.
    """

    grid: tuple[Setting, ...] = GRID
    filler: Filler = "diverse"
    sequences: int = 256
    seed: int = 1_000_000
    batch_size: int = 32

    def __post_init__(self) -> None:
        if not self.grid:
            raise ValueError("grid needs at least one [length, pairs]")
        check_seed(self.seed)
        for name in ("sequences", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def batch(self) -> int:
        return self.batch_size

    def task(self, subject: Subject) -> RecallConfig:
        """What the subject was trained on; ValueError for one of text."""
        if subject.recall is None:
            raise ValueError(
                f"{subject.name} was trained on text; {self.title} needs a run trained on "
                "data.source = recall"
            )
        return subject.recall

    def samples(self, subject: Subject) -> list[Sample]:
        for length, pairs in self.grid:
            check_room(length, pairs, self.task(subject))
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

    @torch.inference_mode()
    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        made = [self._sequence(subject, *sample.content) for sample in samples]
        input_ids, labels = (torch.cat(part) for part in zip(*made, strict=True))
        logits = subject.model(input_ids=input_ids.to(subject.model.device), use_cache=False).logits
        asked = labels != IGNORED
        right = (logits.argmax(-1).cpu() == labels) & asked
        return [
            {
                "prompt": prompt_hash(row),
                "right": int(found.sum()),
                "asked": int(wanted.sum()),
                "scores": {self._score(*sample.content[:2]): (found.sum() / wanted.sum()).item()},
            }
            for row, found, wanted, sample in zip(input_ids, right, asked, samples, strict=True)
        ]

    def _sequence(
        self, subject: Subject, length: int, pairs: int, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = np.random.SeedSequence((self.seed, length, pairs, number))
        generator = torch.Generator().manual_seed(int(state.generate_state(1, np.uint64)[0]) >> 1)
        batch = recall_batch(generator, 1, length, pairs, self.task(subject), self.filler)
        return batch.input_ids, batch.labels

    def _score(self, length: int, pairs: int) -> str:
        return f"{self.title}@{length}/{pairs}"

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        means, asked = mean_scores(records), Counter[str]()
        for record in records:
            asked.update(dict.fromkeys(record["scores"], record["asked"]))
        rows = [
            {"length": length, "pairs": pairs, "accuracy": means[score], "queries": asked[score]}
            for length, pairs in self.grid
            for score in [self._score(length, pairs)]
        ]
        chance = 1 / self.task(subject).values
        return {"grid": rows, "chance": chance, "sequences": self.sequences, "filler": self.filler}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        grid = results["grid"]
        return {self._score(row["length"], row["pairs"]): row["accuracy"] for row in grid}
