"""What each part of a model is worth: the held-out loss without it."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.layout import Span
from meanbank.core.state import State
from meanbank.core.table import Table, look_up
from meanbank.core.values import Values
from meanbank.evaluation.base import Record, Sample, Subject, standard_error
from meanbank.evaluation.windows import Windows, summed
from meanbank.memory.kvm import KeyValueMeans
from meanbank.memory.window import WindowMemory
from meanbank.model import MeanbankForCausalLM
from meanbank.model.attention import SoftmaxAttention
from meanbank.values.parts import Part

WHOLE = "whole"
PIECE = 4096  # rows of a table that are read at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts(Windows, tag="parts"):
    """Held-out loss with each part of each layer's values left out, and without compressed rows.

    A part is what a coefficient or a gate scales in a layer's values (a bank's gamma; a and b of a
    mixture): that is set to zero, where other layers read these values, too. `memory` is what KVM
    layers remember beyond their window, which alone is read then.

    Settings as of `Windows`. The standard error of a difference is over windows.
    """

    max_tokens: int | None = 65536

    def samples(self, subject: Subject) -> Sequence[Sample]:
        parts = parts_of(subject.model)
        if not parts:
            raise ValueError(
                f"{subject.name} has no parts to leave out: no layer has a bank, a mixture or "
                "other values with a coefficient, and none is kvm"
            )
        length, starts = self.length(subject), self.starts(subject)
        return [
            Sample(id=f"{name}/{start}", content=start, group=name, size=length)
            for name in (WHOLE, *parts)
            for start in starts
        ]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        name, part = samples[0].group, contextlib.nullcontext()
        if name != WHOLE:
            part = parts_of(subject.model)[name].left_out()
        with part:
            return self.losses(subject, [sample.content for sample in samples])

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        parts = parts_of(subject.model)
        windows = len(records) // (1 + len(parts))
        groups = [records[first : first + windows] for first in range(0, len(records), windows)]
        whole, *others = groups
        rms = RootMeanSquares()
        found = [
            _result(part, whole, without, rms)
            for part, without in zip(parts.values(), others, strict=True)
        ]
        return {WHOLE: summed(whole), "parts": found}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {
            f"{self.title}:{part['layer']}.{part['part']}": part["difference"]
            for part in results["parts"]
        }


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


def _result(
    part: LayerPart, whole: Sequence[Record], without: Sequence[Record], rms: "RootMeanSquares"
) -> dict[str, Any]:
    coefficient = table_rms = product = None
    if isinstance(part.part, Part):
        coefficient = part.part.coefficient
        table_rms = None if part.part.table is None else rms(part.part.table)
    if coefficient is not None and table_rms is not None:
        product = coefficient * table_rms
    before, after = summed(whole), summed(without)
    differences = [
        (b["nats"] - a["nats"]) / a["tokens"]
        for a, b in zip(whole, without, strict=True)
        if a["tokens"]
    ]
    return {
        "layer": part.layer,
        "part": part.name,
        "coefficient": coefficient,
        "table_rms": table_rms,
        "product": product,
        "loss_whole": before["nats_per_token"],
        "loss_without": after["nats_per_token"],
        "difference": after["nats_per_token"] - before["nats_per_token"],
        "standard_error": standard_error(differences),
        "bpb_without": after["bpb"],
    }


class RootMeanSquares:
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
