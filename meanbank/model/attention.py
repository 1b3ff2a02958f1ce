"""Softmax attention put together from its three parts: the one place that sees both axes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.geometry import Geometry, merge_heads
from meanbank.core.state import State
from meanbank.model.layers import Address, AddressState
from meanbank.model.mixer import Mixer
from meanbank.model.plan import LayerPlan
from meanbank.values import Place


@dataclasses.dataclass(frozen=True)
class AttentionState(State):
    """What the address, the value source and the memory carry on."""

    address: AddressState
    values: Any
    memory: Any


class SoftmaxAttention(Mixer):
    """Address (queries, keys), value source and memory, and the output projection."""

    def __init__(
        self, plan: LayerPlan, geometry: Geometry, place: Place, rope_theta: float
    ) -> None:
        super().__init__()
        self.address = Address(geometry, rope_theta)
        self.values = plan.values.build(geometry, place)
        self.memory = plan.memory.build(geometry)
        width = geometry.num_heads * geometry.value_dim
        self.output = nn.Linear(width, geometry.hidden_size, bias=False)

    def forward(
        self, x: Tensor, context: Context, state: AttentionState | None
    ) -> tuple[Tensor, AttentionState]:
        query, key, address = self.address(x, state and state.address, context.layout)
        values, value_state = self.values(x, context, state and state.values)
        output, memory = self.memory(query, key, values, x, state and state.memory, context.layout)
        return self.output(merge_heads(output)), AttentionState(address, value_state, memory)

    def publish(self, embedding: Tensor, context: Context) -> Tensor:
        return self.values.publish(embedding, context)

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype) -> int:
        stored = self.values.stored_nbytes(dtype)
        tail = (self.address.tail_width + self.values.tail_width) * dtype.itemsize
        return self.memory.nbytes_max(tokens, batch, dtype, stored) + batch * tail

    def initialize(self, ratio: float) -> None:
        self.address.initialize(ratio)
        self.values.initialize(ratio)
        self.memory.initialize()

    def initialize_table(self, inputs: Callable[[], Tensor]) -> None:
        self.values.initialize_table(inputs)

    @property
    def output_projection(self) -> nn.Linear:
        return self.output
