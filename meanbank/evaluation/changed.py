"""Another evaluation of the trained model, with other memories than in training."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from meanbank.evaluation.base import Evaluation, Record, Sample, Subject
from meanbank.memory import MemoryConfig
from meanbank.memory.budgets import Budget
from meanbank.model import MeanbankForCausalLM, layers_at
from meanbank.model.memory_change import with_memories


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed(Evaluation, tag="changed"):
    """What `evaluation` gives when the memories are changed between training and use.

    memory: in place of that of every layer of softmax attention, whole. budget: in place of the
    budget alone, in the layers that have one. where: in these layers, as in a plan. One of memory
    and budget; weights, addresses and values stay, see `meanbank.model.memory_change`.
    evaluation: has no name of its own: its scores begin with this one's title. Its results are
    here, and `change` besides: the layers, the parameters that are new, and those dropped.
    """

    evaluation: Evaluation
    memory: MemoryConfig | None = None
    budget: Budget | None = None
    where: str | tuple[int, ...] = "all"

    def __post_init__(self) -> None:
        if (self.memory is None) == (self.budget is None):
            raise ValueError(
                "a change is of memory (with its budget) or of budget alone: give one of them"
            )
        if isinstance(self.evaluation, Changed):
            raise ValueError("a change of a change cannot be evaluated; give the last one alone")
        if self.evaluation.name is not None:
            raise ValueError(
                f"the evaluation of a change has the name of the change; name that "
                f"{self.evaluation.name!r}"
            )

    @functools.cached_property
    def named(self) -> Evaluation:
        """The evaluation under this one's title."""
        return dataclasses.replace(self.evaluation, name=self.title)

    @property
    def alone(self) -> bool:
        return self.evaluation.alone

    @property
    def batch(self) -> int:
        return self.evaluation.batch

    def prepared(self, subject: Subject) -> Subject:
        model = subject.model
        if not isinstance(model, MeanbankForCausalLM):
            name = type(model).__name__
            raise ValueError(f"memories can be changed in meanbank models only, got {name}")
        change = with_memories(model, self.memories(model))
        told = {"layers": change.layers, "new": change.new, "dropped": change.dropped}
        return dataclasses.replace(
            subject,
            model=change.model,
            open_corpus=subject.open_corpus and (lambda: subject.corpus),  # opened once
            change={name: list(values) for name, values in told.items()},
        )

    def memories(self, model: MeanbankForCausalLM) -> dict[int, MemoryConfig]:
        """The new memories by layer; ValueError where no layer has anything to change."""
        plans = model.config.plans()
        layers = layers_at(self.where, len(plans))
        if isinstance(self.where, str):  # a place passes over what has no such thing
            layers = [n for n in layers if plans[n].memory.has_address]
        found: dict[int, MemoryConfig] = {}
        for layer in layers:
            memory: Any = plans[layer].memory
            if self.memory is not None:
                found[layer] = self.memory
            elif any(field.name == "budget" for field in dataclasses.fields(memory)):
                found[layer] = dataclasses.replace(memory, budget=self.budget)
            elif not isinstance(self.where, str):
                raise ValueError(
                    f"layer {layer} has no budget to change: its memory is {memory.tag}"
                )
        if not found:
            what = "softmax attention" if self.budget is None else "a memory with a budget"
            raise ValueError(f"no layer at {self.where!r} has {what}: nothing would be changed")
        return found

    def samples(self, subject: Subject) -> Sequence[Sample]:
        return self.named.samples(subject)

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        return self.named.measure(subject, samples)

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        return {**self.named.results(subject, records), "change": dict(subject.change)}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return self.named.scores(results)

    def inputs(self) -> dict[str, Any]:
        return self.named.inputs()

    def prompt_lengths(self, subject: Subject) -> tuple[int, ...]:
        return self.named.prompt_lengths(subject)
