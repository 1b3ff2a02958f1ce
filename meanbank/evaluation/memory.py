"""Bytes of memory against context, in closed form."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meanbank.evaluation.base import Evaluation, Record, Sample, Subject
from meanbank.model import MeanbankForCausalLM
from meanbank.model.memory_plan import bank_saving, weight_nbytes

CONTEXTS = tuple(2**k for k in range(10, 21))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBytes(Evaluation, tag="memory"):
    """Most bytes that the states of all layers hold after so many tokens, in the model's dtype.

    Small shift tails are in it. Bank tables are parameters: they are reported apart, since they do
    not grow with the context and are shared by all sequences. `saved` has what banks leave out,
    less their tables, as a share of values, and of keys and values.
    """

    contexts: tuple[int, ...] = CONTEXTS
    batch_size: int = 1

    def __post_init__(self) -> None:
        if min((self.batch_size, *self.contexts)) < 1 or not self.contexts:
            raise ValueError(
                f"contexts and batch_size must be at least 1, got {list(self.contexts)} and "
                f"{self.batch_size}"
            )

    def samples(self, subject: Subject) -> list[Sample]:
        if not isinstance(subject.model, MeanbankForCausalLM):
            raise ValueError(
                f"{subject.name} is not a model of meanbank: there is no closed form of its bytes; "
                "the task serving counts them"
            )
        return [Sample(id=str(tokens), content=tokens) for tokens in self.contexts]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        model: Any = subject.model
        return [
            {
                "tokens": sample.content,
                "bytes": model.model.memory_nbytes_max(sample.content, self.batch_size),
            }
            for sample in samples
        ]

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        model: Any = subject.model
        weights, tables = weight_nbytes(model)
        saved = [bank_saving(model, row["tokens"], self.batch_size) for row in records]
        return {
            "batch": self.batch_size,
            "contexts": list(records),
            "saved": [dataclasses.asdict(row) for row in saved if row],
            "table_bytes": tables,
            "parameter_bytes": weights + tables,
        }

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {f"{self.title}@{row['tokens']}": row["bytes"] for row in results["contexts"]}
