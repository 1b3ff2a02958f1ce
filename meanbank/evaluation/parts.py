"""What each part of a model is worth: the held-out loss without it."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meanbank.core.layout import Span
from meanbank.core.state import State
from meanbank.core.table import Table, look_up
from meanbank.core.values import Values
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, prompt_hash
from meanbank.evaluation.bpb import bits_per_byte, window_starts
from meanbank.evaluation.losses import token_losses
from meanbank.memory.kvm import KeyValueMeans
from meanbank.memory.window import WindowMemory
from meanbank.model import MeanbankForCausalLM
from meanbank.model.attention import SoftmaxAttention
from meanbank.values.parts import Part

WHOLE = "whole"
PIECE = 4096  # rows of a table that are read at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts(Evaluation, tag="parts"):
    """Held-out loss with each part of each layer's values left out, and without compressed rows.

    A part is what a coefficient or a gate scales in a layer's values (a bank's gamma; a and b of a
    mixture): that is set to zero, where other layers read these values, too. `memory` is what KVM
    layers remember beyond their window, which alone is read then.

    max_tokens: at most that many held-out tokens, in evenly spread windows, each read from a fresh
    start. length: tokens of a window; by default those of a training sequence.
    """

    max_tokens: int | None = 65536
    length: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("max_tokens", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def batch(self) -> int:
        return self.batch_size

    def samples(self, subject: Subject) -> Sequence[Sample]:
        parts = parts_of(subject.model)
        if not parts:
            raise ValueError(
                f"{subject.name} has no parts to leave out: no layer has a bank, a mixture or "
                "other values with a coefficient, and none is kvm"
            )
        total, length = len(subject.corpus.held_out.tokens), self._length(subject)
        starts = window_starts(total, length, self.max_tokens)
        return [
            Sample(id=f"{name}/{start}", content=start, group=name, size=length)
            for name in (WHOLE, *parts)
            for start in starts
        ]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        name, length = samples[0].group, self._length(subject)
        corpus = subject.corpus
        rows = [corpus.held_out.tokens[s.content : s.content + length + 1] for s in samples]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        sizes = torch.from_numpy(np.asarray(corpus.token_bytes, dtype=np.int64))[tokens[:, 1:]]
        part = contextlib.nullcontext()
        if name != WHOLE:
            part = parts_of(subject.model)[name].left_out()
        with part:
            losses = token_losses(subject.model, tokens).double() * (sizes > 0)
        return [
            {
                "prompt": prompt_hash(row),
                "nats": nats.sum().item(),
                "tokens": int((size > 0).sum()),
                "bytes": int(size.sum()),
            }
            for row, nats, size in zip(tokens, losses, sizes, strict=True)
        ]

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        parts = parts_of(subject.model)
        windows = len(records) // (1 + len(parts))
        groups = [records[first : first + windows] for first in range(0, len(records), windows)]
        whole, *others = groups
        rms = _RootMeanSquares()
        found = [
            _result(part, whole, without, rms)
            for part, without in zip(parts.values(), others, strict=True)
        ]
        return {WHOLE: _summed(whole) | {"windows": windows}, "parts": found}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {
            f"{self.title}:{part['layer']}.{part['part']}": part["difference"]
            for part in results["parts"]
        }

    def _length(self, subject: Subject) -> int:
        length = self.length or subject.training_length
        if length is None:
            raise ValueError(
                f"nobody knows how long the training sequences of {subject.name} were; give length"
            )
        return length


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPart:
    """A part of one layer, which `left_out` leaves out."""

    layer: int
    name: str
    part: "Part | WithoutRows"

    def left_out(self) -> contextlib.AbstractContextManager[None]:
        return self.part.left_out()


def parts_of(model: nn.Module) -> dict[str, LayerPart]:
    """What can be left out of a model, by `LAYER.NAME`; ValueError for one that is not ours."""
    if not isinstance(model, MeanbankForCausalLM):
        raise ValueError(f"parts are known of meanbank models only, got {type(model).__name__}")
    shared, parts = model.model.shared_table, []
    for number, block in enumerate(model.model.layers):
        attention: Any = block.attention
        parts += [LayerPart(number, p.name, p) for p in attention.values.parts(shared)]
        if isinstance(attention, SoftmaxAttention) and isinstance(attention.memory, KeyValueMeans):
            parts.append(LayerPart(number, "memory", WithoutRows(attention, attention.memory)))
    return {f"{part.layer}.{part.name}": part for part in parts}


@dataclasses.dataclass(frozen=True, eq=False)
class WithoutRows:
    """The compressed rows of a KVM layer, sink included."""

    attention: SoftmaxAttention
    memory: KeyValueMeans

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within it queries see the window alone; caches begun outside do not fit."""
        self.attention.memory = WindowOfKVM(self.memory)
        try:
            yield
        finally:
            self.attention.memory = self.memory


class WindowOfKVM(WindowMemory):
    """The exact window of a KVM memory, read at its temperature, and nothing else."""

    def __init__(self, memory: KeyValueMeans) -> None:
        super().__init__(memory.geometry, memory.window)
        temperature = memory.window_temperature
        self.temperature: Tensor | None = None if temperature is None else temperature.detach()

    def forward(
        self, query, key, values: Values, gate_input, state, span: Span
    ) -> tuple[Tensor, State]:
        if self.temperature is not None:
            query = query * self.temperature.to(query.dtype)[:, None, None]
        return super().forward(query, key, values, gate_input, state, span)


def _summed(records: Sequence[Record]) -> dict[str, Any]:
    nats, tokens, size = (sum(r[name] for r in records) for name in ("nats", "tokens", "bytes"))
    return {
        "bpb": bits_per_byte(nats / math.log(2), size),
        "nats_per_token": nats / tokens,
        "tokens": tokens,
        "bytes": size,
    }


def _result(
    part: LayerPart, whole: Sequence[Record], without: Sequence[Record], rms: "_RootMeanSquares"
) -> dict[str, Any]:
    """Of one part; the standard error of the difference is over windows."""
    coefficient = table_rms = product = None
    if isinstance(part.part, Part):
        coefficient = part.part.coefficient
        table_rms = None if part.part.table is None else rms(part.part.table)
    if coefficient is not None and table_rms is not None:
        product = coefficient * table_rms
    before, after = _summed(whole), _summed(without)
    differences = [
        (b["nats"] - a["nats"]) / a["tokens"]
        for a, b in zip(whole, without, strict=True)
        if a["tokens"]
    ]
    error = None
    if len(differences) > 1:
        error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return {
        "layer": part.layer,
        "part": part.name,
        "coefficient": coefficient,
        "table_rms": table_rms,
        "product": product,
        "loss_whole": before["nats_per_token"],
        "loss_without": after["nats_per_token"],
        "difference": after["nats_per_token"] - before["nats_per_token"],
        "standard_error": error,
        "bpb_without": after["bpb"],
    }


class _RootMeanSquares:
    """Of all numbers of a table, wherever it is stored; a shared one is read once."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    @torch.no_grad()
    def __call__(self, table: Table) -> float:
        if id(table) not in self.known:
            rows, total = table.shape[0], 0.0
            device = table.device if isinstance(table, Tensor) else None
            for start in range(0, rows, PIECE):
                ids = torch.arange(start, min(start + PIECE, rows), device=device)
                total += look_up(ids, table).double().square().sum().item()
            self.known[id(table)] = math.sqrt(total / (rows * table.shape[1]))
        return self.known[id(table)]
