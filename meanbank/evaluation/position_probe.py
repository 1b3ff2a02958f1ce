"""How much position a linear probe reads from the keys that a KVM memory stores."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.config import check_least
from meanbank.evaluation.base import Record, Sample, Subject, prompt_hash
from meanbank.evaluation.linear_probe import explained, moments
from meanbank.evaluation.memory_statistics import blocks_that_leave, memories_of
from meanbank.evaluation.sequences import Sequences
from meanbank.memory.kvm import KeyValueMeans
from meanbank.model import MeanbankForCausalLM

PROBES = ("read", "rotary", "content", "shuffled")
POSITION, SHUFFLED = -2, -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionProbe(Sequences, tag="position-probe"):
    """R^2 of a ridge regression of position on stored keys, by KVM layer, means over heads.

    Of every token that leaves the window: its key as a row of that token alone would be read (LN_s
    applied, unless read_key is raw), and its position from 0 to 1 within the sequence. Fitted on
    every other document (recall: sequence), judged on the rest. read: from all channels; rotary:
    from the rotated ones alone; content: from the others alone; shuffled: from all, but positions
    change places within a document. Settings as of `Sequences`.
    """

    count: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 2, "count")

    @property
    def batch(self) -> int:
        return 2**31  # layers are measured together, while the documents are read once

    def samples(self, subject: Subject) -> Sequence[Sample]:
        memories, length = kvm_memories(subject.model), self.length(subject)
        if not memories:
            raise ValueError(f"no layer of {subject.name} is kvm")
        window = max(memory.window.span for memory in memories.values())
        if length <= window:
            raise ValueError(
                f"nothing leaves a window of {window} tokens within {length} tokens; give a larger "
                "sequence_length"
            )
        numbers = self.numbers(subject)
        if len(numbers) < 2:
            raise ValueError(
                f"a single held-out document has {length} tokens, and a probe needs two: one to "
                "be fitted on and one to be judged on; give a smaller sequence_length"
            )
        return [
            Sample(id=str(layer), content=layer, size=length * len(numbers)) for layer in memories
        ]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        model: Any = subject.model
        memories = kvm_memories(model)
        layers = {sample.content: memories[sample.content] for sample in samples}
        sums = {layer: [torch.zeros((), device="cpu") for _ in range(2)] for layer in layers}
        documents = []
        for at, number in enumerate(self.numbers(subject)):
            tokens = self.tokens(subject, number)
            documents.append(prompt_hash(tokens))
            for layer, found in position_moments(model, layers, tokens, seed=number).items():
                sums[layer][at % 2] = sums[layer][at % 2] + found
        return [
            {"prompt": prompt_hash(" ".join(documents)), "layer": layer}
            | _probes(memory, *sums[layer])
            for layer, memory in layers.items()
        ]

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        layers = [{k: v for k, v in record.items() if k != "prompt"} for record in records]
        numbers = self.numbers(subject)
        return {"documents": len(numbers), "length": self.length(subject), "layers": layers}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {
            f"{self.title}:{layer['layer']}.{name}": layer[name]
            for layer in results["layers"]
            for name in PROBES
            if layer[name] is not None
        }


def kvm_memories(model: nn.Module) -> dict[int, KeyValueMeans]:
    """The KVM memories by layer; ValueError for a model that is not ours."""
    found = memories_of(model).items()
    return {layer: memory for layer, memory in found if isinstance(memory, KeyValueMeans)}


@torch.inference_mode()
def position_moments(
    model: MeanbankForCausalLM, memories: Mapping[int, KeyValueMeans], tokens: Tensor, seed: int
) -> dict[int, Tensor]:
    """`moments` by layer of the keys that one sequence of tokens (T,) stores.

    Targets are their positions in [0, 1], and the same shuffled.
    """
    keys: dict[int, list[Tensor]] = {layer: [] for layer in memories}
    for layer, _, before in blocks_that_leave(model, tokens, model.model.new_cache()):
        if layer in memories:
            stored, normalized, _ = memories[layer].routing(before.memory)
            raw = memories[layer].config.read_key == "raw"
            keys[layer].append((stored if raw else normalized)[0])
    sums = {}
    for layer, blocks in keys.items():
        key = torch.cat(blocks, dim=1)  # of the first tokens, in order
        position = torch.arange(key.shape[1], dtype=torch.float64, device="cpu")
        position /= len(tokens) - 1
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(position), generator=generator, device="cpu")
        sums[layer] = moments(key, torch.stack([position, position[order]], dim=1))
    return sums


def _probes(memory: KeyValueMeans, fitted: Tensor, judged: Tensor) -> dict[str, float | None]:
    """R^2 by probe, means over heads; None where there are no such channels."""
    rotary, width = memory.geometry.rotary_dim, memory.geometry.key_dim
    asked = {
        "read": (range(width), POSITION),
        "rotary": (range(rotary), POSITION),
        "content": (range(rotary, width), POSITION),
        "shuffled": (range(width), SHUFFLED),
    }
    return {
        name: explained(fitted, judged, *which).mean().item() if len(which[0]) else None
        for name, which in asked.items()
    }
