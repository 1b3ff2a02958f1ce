"""Softmax attention put together from its three parts: the one place that sees both axes."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry, merge_heads
from meanbank.core.state import State
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
        output, memory = self.memory(query, key, values, x, state and state.memory, context.layout)
        return self.output(merge_heads(output)), AttentionState(address, value_state, memory)

    def publish(self, start: Tensor, context: Context, state: AttentionState | None) -> Tensor:
        return self.values.publish(start, start, context)

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype) -> int:
        stored = self.values.stored_nbytes(dtype)
        tail = (self.address.tail_width + self.values.tail_width) * dtype.itemsize
        return self.memory.nbytes_max(tokens, batch, dtype, stored) + batch * tail

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
