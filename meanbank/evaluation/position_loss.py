"""Loss by token position, to several times the training length."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from meanbank.core.config import check_least
from meanbank.evaluation.base import (
    Evaluation,
    Record,
    Sample,
    Subject,
    prompt_hash,
    standard_error,
)
from meanbank.evaluation.losses import token_losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionLoss(Evaluation, tag="position-loss"):
    """Mean loss in nats by position in held-out documents, each read once from its start.

    multiple: how many times the training length is read of each document; default the largest of
    8, 4, 2, 1 for which there is a document that long. training_length: default the subject's.
    buckets: parts of a training length whose means are reported. max_documents: the first ones
    that are long enough, so models see the same; default all.

    A bucket's standard error is over documents. `at[k]` is the mean over positions [k T / 2, k T)
    for k = 1, 2, 4, ... A document goes through the cache in chunks: memory does not grow with it.
    """

    multiple: int | None = None
    training_length: int | None = None
    buckets: int = 4
    max_documents: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "multiple", "training_length", "buckets", "max_documents")

    def base(self, subject: Subject) -> int:
        """T: tokens of a training sequence."""
        return self.training_length or subject.known_training_length("training_length")

    def times(self, subject: Subject) -> int:
        """How many training lengths are read of each document."""
        longest = int(subject.corpus.held_out.lengths.max())
        fitting = (m for m in (8, 4, 2, 1) if m * self.base(subject) <= longest)
        return self.multiple or next(fitting, 1)

    def samples(self, subject: Subject) -> list[Sample]:
        held_out = subject.corpus.held_out
        length = self.times(subject) * self.base(subject)
        if length < 2:
            raise ValueError("a single token has no loss; set multiple or training_length to more")
        documents = held_out.documents_at_least(length)[: self.max_documents]
        if len(documents) == 0:
            raise ValueError(
                f"no held-out document has {length} tokens ({self.times(subject)} x the training "
                f"length), the longest has {held_out.lengths.max()}; use longer documents, or "
                "set multiple to fewer"
            )
        return [Sample(id=str(d), content=int(d), size=length) for d in documents]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        return [self._read(subject, sample.content, sample.size) for sample in samples]

    def _read(self, subject: Subject, document: int, length: int) -> Record:
        tokens = subject.corpus.held_out.document(document)[:length].astype(np.int64)
        row = torch.from_numpy(tokens)[None]
        losses = token_losses(subject.model, row, prefix=subject.prefix)[0].double()

        def mean(start: int, stop: int) -> float:
            return losses[max(start - 1, 0) : stop - 1].mean().item()  # entry i predicts i + 1

        base = self.base(subject)
        return {
            "prompt": prompt_hash(tokens),
            "buckets": [mean(*place) for place in self._places(base, length)],
            "at": [mean(*place) for place in self._halves(base, length).values()],
        }

    def _places(self, base: int, length: int) -> list[tuple[int, int]]:
        width = max(2, base // self.buckets)  # nothing predicts the first token
        return [(start, start + width) for start in range(0, length - width + 1, width)]

    def _halves(self, base: int, length: int) -> dict[int, tuple[int, int]]:
        multiple = length // base
        powers = [2**k for k in range(multiple.bit_length()) if 2**k <= multiple]
        places = {power: (power * base // 2, power * base) for power in powers}
        return {power: place for power, place in places.items() if place[1] > 1}

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        base = self.base(subject)
        length = self.times(subject) * base

        def rows(name: str, places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
            columns = np.array([record[name] for record in records]).T
            return [
                {
                    "start": start,
                    "stop": stop,
                    "loss": column.mean(),
                    "standard_error": standard_error(column.tolist()),
                }
                for (start, stop), column in zip(places, columns, strict=True)
            ]

        halves = self._halves(base, length)
        at = rows("at", list(halves.values()))
        return {
            "training_length": base,
            "length": length,
            "documents": len(records),
            "buckets": rows("buckets", self._places(base, length)),
            "at": {str(k): row for k, row in zip(halves, at, strict=True)},
        }

    def prompt_lengths(self, subject: Subject) -> tuple[int, ...]:
        base = self.base(subject)
        return tuple(k * base for k in self._halves(base, self.times(subject) * base))

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {f"{self.title}@{k}x": row["loss"] for k, row in results["at"].items()}
