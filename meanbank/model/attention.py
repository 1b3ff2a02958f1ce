"""Softmax attention put together from its three parts: the one place that sees both axes."""

import dataclasses
from typing import Any

from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.geometry import Geometry, merge_heads
from meanbank.core.state import State
from meanbank.model.layers import Address, AddressState
from meanbank.model.plan import LayerPlan
from meanbank.values import Place


@dataclasses.dataclass(frozen=True)
class AttentionState(State):
    """What the address, the value source and the memory carry on."""

    address: AddressState
    values: Any
    memory: Any


class SoftmaxAttention(nn.Module):
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
        """x (B, T, hidden_size), normalised -> (B, T, hidden_size) and the state after T tokens."""
        query, key, address = self.address(x, state and state.address, context.layout)
        values, value_state = self.values(x, context, state and state.values)
        output, memory = self.memory(query, key, values, x, state and state.memory, context.layout)
        return self.output(merge_heads(output)), AttentionState(address, value_state, memory)
