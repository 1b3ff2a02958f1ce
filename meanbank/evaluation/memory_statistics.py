"""How a model uses its compressed memories: rows, what they hold, and how alike it is."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meanbank.evaluation.base import Record, Sample, Subject, prompt_hash
from meanbank.evaluation.sequences import Sequences
from meanbank.memory.operator import OperatorMemory, OperatorState, unmarked
from meanbank.model import MeanbankCache, MeanbankForCausalLM

PIECE = 1024  # tokens that are read at a time, and whose updates are looked at together
SCORES = ("rows", "append_similarity", "merge_similarity", "dead_rows", "effective_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryStatistics(Sequences, tag="memory-statistics"):
    """What the rows of each layer hold after a document, means over heads and documents.

    Settings as of `Sequences`.
    """

    def samples(self, subject: Subject) -> Sequence[Sample]:
        if not memories_of(subject.model):
            raise ValueError(f"no layer of {subject.name} has compressed rows")
        length = self.length(subject)
        return [Sample(id=str(n), content=n, size=length) for n in self.numbers(subject)]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        model: Any = subject.model
        records = []
        for sample in samples:
            tokens = self.tokens(subject, sample.content)
            layers = layer_statistics(model, tokens)
            records.append({"prompt": prompt_hash(tokens), "layers": layers})
        return records

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        model: Any = subject.model
        layers = []
        for at, first in enumerate(records[0]["layers"]):
            told = [record["layers"][at] for record in records]
            names = {"layer": first["layer"], "memory": first["memory"]}
            means = {name: _mean(of[name] for of in told) for name in first if name not in names}
            layers.append(names | means | learned(model, first["layer"]))
        return {
            "documents": len(records),
            "length": self.length(subject),
            "layers": layers,
            "mean": {name: _mean(layer[name] for layer in layers) for name in SCORES},
        }

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {
            f"{self.title}:{name}": value
            for name, value in results["mean"].items()
            if value is not None
        }


def memories_of(model: nn.Module) -> dict[int, OperatorMemory]:
    """The memories of compressed rows by layer; ValueError for a model that is not ours."""
    if not isinstance(model, MeanbankForCausalLM):
        name = type(model).__name__
        raise ValueError(f"memories are known of meanbank models only, got {name}")
    memories: dict[int, OperatorMemory] = {}
    for number, block in enumerate(model.model.layers):
        attention: Any = block.attention
        memory = next((m for m in attention.children() if isinstance(m, OperatorMemory)), None)
        if memory is not None:
            memories[number] = memory
    return memories


@torch.inference_mode()
def blocks_that_leave(
    model: MeanbankForCausalLM, tokens: Tensor, cache: MeanbankCache
) -> Iterator[tuple[int, OperatorState, OperatorState]]:
    """Reads one sequence of tokens (T,) into an empty cache and tells what leaves each window.

    Gives, for every block of every layer that has compressed rows: the layer, a later state, and
    the state just before the block left, as in `OperatorState.past`.
    """
    cache.activate_past_recording(PIECE)
    for start in range(0, len(tokens), PIECE):
        piece = tokens[None, start : start + PIECE].to(model.device)
        model.model(input_ids=piece, cache=cache)
        for number in memories_of(model):
            state: Any = cache.layers[number].state
            after: OperatorState = state.attention.memory
            for before in after.past:
                if before.memory.seen >= start:
                    yield number, after, before


@torch.inference_mode()
def layer_statistics(model: MeanbankForCausalLM, tokens: Tensor) -> list[dict[str, Any]]:
    """What the rows of each layer hold after one sequence of tokens (T,), means over heads.

    rows, budget, appended, merged: as `cache.describe()` tells them.
    append_similarity, merge_similarity: mean cosine of the vectors that tokens are routed by: of
        tokens that opened rows with the row most alike before (where there was one), and of those
        that were merged with the row they went into, as it was before their block.
    dead_rows: those that hold the token that opened them and no other.
    effective_rows: exp of the entropy of the rows' shares of tokens, at most `rows`.
    """
    memories, cache = memories_of(model), model.model.new_cache()
    cache.activate_provenance()
    found: dict[int, list[tuple[Tensor, Tensor]]] = {number: [] for number in memories}
    for number, after, before in blocks_that_leave(model, tokens, cache):
        found[number].append(similarities(memories[number], after, before))
    described = cache.describe().layers
    layers = []
    for number in memories:
        told, rows = described[number], cache.provenance(number).rows
        append, merge = (torch.cat(parts) if parts else None for parts in _columns(found[number]))
        counts = [head.long().bincount(minlength=told.rows[0]) for head in rows]
        layers.append(
            {
                "layer": number,
                "memory": told.memory,
                "rows": told.rows[0],
                "budget": told.budget[0],
                "appended": told.appended[0],
                "merged": told.merged[0],
                "append_similarity": _mean_of(append),
                "merge_similarity": _mean_of(merge),
                "dead_rows": _mean(int((count == 1).sum()) for count in counts),
                "effective_rows": _mean(_effective(count) for count in counts),
            }
        )
    return layers


def similarities(
    memory: OperatorMemory, after: OperatorState, before: OperatorState
) -> tuple[Tensor, Tensor]:
    """Cosines of the tokens of one block that opened rows, and of those that were merged.

    after: a later state, with provenance; before: of its past. Both are of one sequence; all heads
    together, see `layer_statistics`.
    """
    assert after.destination is not None
    token, own, rows = (vectors[0] for vectors in memory.routing(before.memory))
    start = before.memory.seen - memory.window.span
    block = after.destination[0, :, start : start + token.shape[1]]
    count, appended, merged = rows.shape[1], [], []
    for head, (went, opened) in enumerate(zip(*unmarked(block), strict=True)):
        new = own[head].new_zeros(int(opened.sum()), own.shape[2])
        new[(went[opened] - count).long()] = own[head][opened]
        there = torch.cat([rows[head], new])
        cosine = F.normalize(token[head], dim=-1) @ F.normalize(there, dim=-1).mT
        merged.append(cosine[~opened].gather(1, went[~opened, None].long())[:, 0])
        if count:
            nearest = (token[head][opened] @ rows[head].mT).argmax(dim=-1, keepdim=True)
            appended.append(cosine[opened].gather(1, nearest)[:, 0])
    return torch.cat(appended or [token.new_zeros(0)]), torch.cat(merged)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [append for append, _ in pairs], [merge for _, merge in pairs]


def _effective(counts: Tensor) -> float | None:
    """exp of the entropy of shares; None without rows."""
    if not counts.sum():
        return None
    shares = counts[counts > 0].double() / counts.sum()
    return math.exp(-(shares * shares.log()).sum().item())


def _mean_of(values: Tensor | None) -> float | None:
    return None if values is None or not len(values) else values.double().mean().item()


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def learned(model: MeanbankForCausalLM, layer: int) -> dict[str, Any]:
    """What a layer has learned: temperatures by query head, coefficients of its values."""
    attention: Any = model.model.layers[layer].attention
    parts = attention.values.parts(model.model.shared_table)
    return {
        "temperatures": {
            name.rpartition(".")[2].removesuffix("_temperature"): parameter.tolist()
            for name, parameter in attention.named_parameters()
            if name.endswith("temperature")
        },
        "coefficients": {p.name: p.coefficient for p in parts if p.coefficient is not None},
    }
