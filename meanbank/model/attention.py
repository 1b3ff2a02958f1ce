"""Softmax attention put together from its three parts: the one place that sees both axes."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry, merge_heads
from meanbank.core.layout import Layout
from meanbank.core.state import (
    State,
    as_index,
    by_place,
    check_kind,
    check_like,
    gathered,
    joined_by_place,
    rows_of,
)
from meanbank.core.tail import tail_nbytes
from meanbank.core.values import Values
from meanbank.memory import Memory
from meanbank.model.backbone import Backbone
from meanbank.model.layers import AddressState
from meanbank.model.mixer import Mixer
from meanbank.model.plan import LayerPlan
from meanbank.values import Place


@dataclasses.dataclass(frozen=True)
class AttentionState(State):
    """What the address, the value source and the memory carry on."""

    address: AddressState | None
    values: Any
    memory: Any

    @classmethod
    def joined(cls, states, seen):
        memory = joined_by_place([state.memory for state in states], seen)
        others = [dataclasses.replace(state, memory=None) for state in states]
        return dataclasses.replace(super().joined(others, seen), memory=memory)


@torch.compiler.disable(reason="operators loop over chunks: they would unroll for each length")
def attend(
    memory: Memory,
    query: Tensor,
    key: Tensor,
    values: Values,
    gate_input: Tensor,
    state: Any,
    layout: Layout,
) -> tuple[Tensor, Any]:
    """Call a memory, span by span where rows differ; see `Memory.forward`.

    A row's memory is that of its last document. Padding gets zeros.
    """
    if layout.is_uniform:
        (span,) = layout.spans
        return memory(query, key, values, gate_input, state if span.seen else None, span)
    width = memory.geometry.value_dim
    output = query.new_zeros(*query.shape[:3], width)
    states = []
    for span in layout.spans:
        assert span.rows is not None
        rows = torch.tensor(span.rows, device=query.device)
        before = rows_of(state, span.rows) if span.seen else None
        part = slice(span.start, span.stop)
        read, new = memory(
            query[rows, :, part],
            key[rows, :, part],
            values.part(rows, span.start, span.stop),
            gate_input[rows, part],
            before,
            span,
        )
        output[rows, :, part] = read.to(output.dtype)  # under autocast queries are more precise
        states.append(new)
    return output, states_after(state, states, layout)


def states_after(old: Any, states: list[Any], layout: Layout) -> Any:
    """One state from those after each span: of every row that after its last one."""
    last = {row: number for number, span in enumerate(layout.spans) for row in span.rows or ()}
    places: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    for number, (span, state) in enumerate(zip(layout.spans, states, strict=True)):
        assert span.rows is not None
        local = [at for at, row in enumerate(span.rows) if last[row] == number]
        if local:
            rows = tuple(span.rows[at] for at in local)
            kept = state if rows == span.rows else state.select(as_index(local))
            places.setdefault(span.total, []).append((rows, kept))
    idle: dict[int, list[int]] = {}
    for row, seen in enumerate(layout.seen):
        if row not in last and seen:
            idle.setdefault(seen, []).append(row)
    for seen, rows in idle.items():
        places.setdefault(seen, []).append((tuple(rows), rows_of(old, tuple(rows))))
    return gathered(layout.batch, places)


class SoftmaxAttention(Mixer):
    """Address (queries, keys), value source and memory, and the output projection."""

    def __init__(
        self, plan: LayerPlan, geometry: Geometry, place: Place, backbone: Backbone
    ) -> None:
        super().__init__(plan, geometry, place, backbone)
        self.address = backbone.address(plan.address, geometry)
        self.values = plan.values.build(geometry, place)
        self.memory = plan.memory.build(geometry)
        width = geometry.num_heads * geometry.value_dim
        self.output = nn.Linear(width, geometry.hidden_size, bias=False)

    def forward(
        self, x: Tensor, start: Tensor | None, context: Context, state: AttentionState | None
    ) -> tuple[Tensor, AttentionState]:
        query, key, address = self.address(x, state and state.address, context.layout)
        values, value_state = self.values(x, start, context, state and state.values)
        held = state and state.memory
        output, memory = attend(self.memory, query, key, values, x, held, context.layout)
        return self.output(merge_heads(output)), AttentionState(address, value_state, memory)

    def publish(self, start: Tensor, context: Context, state: AttentionState | None) -> Tensor:
        return self.values.publish(start, start, context)

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, undo: int = 0) -> int:
        stored = self.values.stored_nbytes(dtype)
        width = self.address.tail_width + self.values.tail_width
        tail = batch * tail_nbytes(width, tokens, dtype, undo)
        return self.memory.nbytes_max(tokens, batch, dtype, stored, undo) + tail

    def state_like(self, tokens: int, batch: int, dtype: torch.dtype) -> AttentionState:
        stored = functools.partial(self.values.stored_like, batch, dtype=dtype)
        memory = self.memory.state_like(tokens, batch, dtype, stored)
        address = self.address.state_like(batch, dtype)
        return AttentionState(address, self.values.state_like(batch, dtype), memory)

    def check_state(self, state: Any, seen: tuple[int, ...]) -> None:
        check_kind(state, AttentionState)
        for batch, count, held in by_place(state.memory, seen):
            stored = functools.partial(self.values.stored_like, batch)
            self.memory.check_state(held, batch, count, stored)
        for name, part in (("address", self.address), ("values", self.values)):
            check_like(getattr(state, name), part.state_like(len(seen), torch.float32), name)

    def flops_by_part(self, tokens: int) -> dict[str, Flops]:
        return {
            "attention": self.memory.flops(tokens),
            "projections": self.address.flops(tokens) + linear_flops(self.output, tokens),
            "values": self.values.flops(tokens),
        }

    def initialize(self, ratio: float) -> None:
        self.address.initialize(ratio)
        self.values.initialize(ratio)
        self.memory.initialize()

    @property
    def output_projection(self) -> nn.Linear:
        return self.output
