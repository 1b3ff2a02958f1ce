"""Multi-query associative recall as an evaluation, by length, pairs and distance."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from meanbank.data import IGNORED, Batch, MqarConfig, mqar_batch
from meanbank.data.mqar import check_pairs, query_distances
from meanbank.evaluation.base import Record, Sample, Subject, prompt_hash
from meanbank.evaluation.pair_grid import PairGrid, Setting
from meanbank.model import batch_invariant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mqar(PairGrid, tag="mqar"):
    """Accuracy on `mqar_batch`, with keys, values and fillers of the subject's own vocabulary.

    So the task is new to the model but no token is. power_a, non_queries: see `MqarConfig`. Other
    settings as of `PairGrid`.
    """

    grid: tuple[Setting, ...] = ((64, 8), (128, 12), (512, 12), (1024, 12), (512, 32))
    power_a: float = 0.01
    non_queries: Literal["random", "constant"] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        MqarConfig(power_a=self.power_a)

    def config(self, subject: Subject) -> MqarConfig:
        """The task in the subject's vocabulary; ValueError where that is not known."""
        recall = self.vocabulary(subject)
        return MqarConfig(
            keys=recall.keys,
            values=recall.values,
            fillers=recall.fillers,
            power_a=self.power_a,
            non_queries=self.non_queries,
        )

    def samples(self, subject: Subject) -> list[Sample]:
        config = self.config(subject)
        for length, pairs in self.grid:
            check_pairs(length, pairs, config)
        return super().samples(subject)

    @torch.inference_mode()
    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        config = self.config(subject)
        batches = [self._sequence(config, *sample.content) for sample in samples]
        inputs = torch.cat([batch.input_ids for batch in batches])
        with batch_invariant():  # no score depends on the batch size
            output = subject.model(input_ids=inputs.to(subject.model.device), use_cache=False)
        found = output.logits.argmax(-1).cpu()
        return [
            self._record(sample, batch, row)
            for sample, batch, row in zip(samples, batches, found, strict=True)
        ]

    def _sequence(self, config: MqarConfig, length: int, pairs: int, number: int) -> Batch:
        return mqar_batch(self.generator(length, pairs, number), 1, length, pairs, config)

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
            "scores": {self.score(length, pairs): sum(right) / len(right)},
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


def _accuracy(right: Sequence[bool]) -> dict[str, Any]:
    return {"accuracy": sum(right) / len(right), "queries": len(right)}


def _buckets(records: Sequence[Record]) -> dict[int, list[bool]]:
    """Which queries were right, by the largest power of two up to the distance in tokens."""
    found: dict[int, list[bool]] = {}
    for record in records:
        for distance, right in zip(record["distances"], record["right"], strict=True):
            found.setdefault(2 ** (distance.bit_length() - 1), []).append(right)
    return found
