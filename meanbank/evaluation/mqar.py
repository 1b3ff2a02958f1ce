"""Multi-query associative recall as an evaluation, by length, pairs and distance."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from meanbank.data import IGNORED, Batch, MqarConfig, mqar_batch
from meanbank.data.mqar import check_pairs, query_distances
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, check_seed, prompt_hash
from meanbank.model import batch_invariant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mqar(Evaluation, tag="mqar"):
    """Share of queries whose value gets the highest logit, see `mqar_batch`.

    For models of the recall source: keys, values and fillers are those of their vocabulary, so the
    task is new to them but no token is. grid: (length, pairs). sequences: for each of them; they
    depend on `seed`, length, pairs and their number only. power_a, non_queries: see `MqarConfig`.
    """

    grid: tuple[tuple[int, int], ...] = ((64, 8), (128, 12), (512, 12), (1024, 12), (512, 32))
    sequences: int = 256
    power_a: float = 0.01
    non_queries: Literal["random", "constant"] = "random"
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"mqar.{name} must be at least 1, got {getattr(self, name)}")
        if not self.grid or len(set(self.grid)) < len(self.grid):
            raise ValueError(f"mqar.grid needs distinct (length, pairs), got {self.grid}")
        check_seed(self.seed)
        MqarConfig(power_a=self.power_a)

    @property
    def batch(self) -> int:
        return self.batch_size

    def config(self, subject: Subject) -> MqarConfig:
        """The task in the subject's vocabulary; ValueError where that is not known."""
        recall = subject.recall
        if recall is None:
            raise ValueError(
                f"{subject.name} was not trained on the recall source; mqar needs a model that was"
            )
        return MqarConfig(
            keys=recall.keys,
            values=recall.values,
            fillers=recall.fillers,
            power_a=self.power_a,
            non_queries=self.non_queries,
        )

    def samples(self, subject: Subject) -> Sequence[Sample]:
        config = self.config(subject)
        for length, pairs in self.grid:
            check_pairs(length, pairs, config)
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

    def _one(self, content: tuple[int, int, int], config: MqarConfig) -> Batch:
        length, pairs, number = content
        state = np.random.SeedSequence((self.seed, length, pairs, number))
        seed = int(state.generate_state(1, np.uint64)[0]) >> 1
        return mqar_batch(torch.Generator().manual_seed(seed), 1, length, pairs, config)

    @torch.inference_mode()
    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        config = self.config(subject)
        batches = [self._one(sample.content, config) for sample in samples]
        inputs = torch.cat([batch.input_ids for batch in batches])
        with batch_invariant():  # no score depends on the batch size
            output = subject.model(input_ids=inputs.to(subject.model.device), use_cache=False)
        found = output.logits.argmax(-1).cpu()
        return [
            self._record(sample, batch, row)
            for sample, batch, row in zip(samples, batches, found, strict=True)
        ]

    def _record(self, sample: Sample, batch: Batch, found: torch.Tensor) -> Record:
        length, pairs, _ = sample.content
        asked = batch.labels[0] != IGNORED
        right = (found == batch.labels[0])[asked].tolist()
        return {
            "prompt": prompt_hash(batch.input_ids),
            "length": length,
            "pairs": pairs,
            "distances": query_distances(batch).tolist(),
            "right": right,
            "scores": {f"{self.title}@{length}/{pairs}": sum(right) / len(right)},
        }

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        grid, by_distance = [], []
        for length, pairs in self.grid:
            cell = {"length": length, "pairs": pairs}
            buckets = _buckets([r for r in records if (r["length"], r["pairs"]) == (length, pairs)])
            grid.append({**cell, **_accuracy([right for of in buckets.values() for right in of])})
            by_distance += [
                {**cell, "from": start, "below": 2 * start, **_accuracy(buckets[start])}
                for start in sorted(buckets)
            ]
        chance = 1 / self.config(subject).values
        return {"grid": grid, "by_distance": by_distance, "chance": chance}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {
            f"{self.title}@{cell['length']}/{cell['pairs']}": cell["accuracy"]
            for cell in results["grid"]
        }


def _accuracy(right: Sequence[bool]) -> dict[str, Any]:
    return {"accuracy": sum(right) / len(right), "queries": len(right)}


def _buckets(records: Sequence[Record]) -> dict[int, list[bool]]:
    """Which queries were right, by the largest power of two up to the distance in tokens."""
    found: dict[int, list[bool]] = {}
    for record in records:
        for distance, right in zip(record["distances"], record["right"], strict=True):
            found.setdefault(2 ** (distance.bit_length() - 1), []).append(right)
    return found
