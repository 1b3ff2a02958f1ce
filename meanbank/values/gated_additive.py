"""A table added to projected values through a gate (modded-nanogpt's value embeddings; the BoV
paper's additive arm)."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.context import Context
from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.table import look_up
from meanbank.core.values import DenseValues
from meanbank.values.base import Place, ValueSource, ValueSourceConfig
from meanbank.values.parts import Gated
from meanbank.values.projected import Projected

GATE_CHANNELS = 12  # of the layer's input, which the gate reads
LARGEST_GATE = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedAdditive(ValueSourceConfig, tag="gated_additive"):
    """`V = contextual + 3 sigmoid(W_g x[:12]) * table[token id]`, one gate a key/value head.

    contextual: the layer's projected values, with their residual and shift.
    """

    needs_token_ids: ClassVar[bool] = True

    contextual: Projected = Projected()

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> "GatedAdditive":
        return dataclasses.replace(self, contextual=self.contextual.resolved(conventions))

    def build(self, geometry: Geometry, place: Place) -> "GatedAdditiveValues":
        return GatedAdditiveValues(self, geometry, place)

    def refers_to(self, place: Place) -> frozenset[int]:
        return self.contextual.refers_to(place)


class GatedAdditiveValues(ValueSource):
    """Parameters: those of the projection, table (vocabulary, Hkv * Dv), gate (Hkv, 12)."""

    def __init__(self, config: GatedAdditive, geometry: Geometry, place: Place) -> None:
        super().__init__(geometry, place)
        self.contextual = config.contextual.build(geometry, place.of_part())
        self.table = nn.Parameter(torch.empty(place.vocabulary, geometry.value_width))
        channels = min(GATE_CHANNELS, geometry.hidden_size)
        self.gate = nn.Linear(channels, geometry.num_kv_heads, bias=False)

    def initialize(self, ratio: float) -> None:
        self.contextual.initialize(ratio)
        bound = (3 / self.geometry.hidden_size) ** 0.5
        init.uniform_(self.table, -bound, bound)
        init.uniform_(self.gate.weight, 0.0, 0.02)

    def forward(self, x, start, context, state):
        contextual, state = self.contextual(x, start, context, state)
        values = contextual.dense() + split_heads(self._added(x, context), self.gate.out_features)
        return DenseValues(values), state

    def parts(self, shared):
        return [Gated("table", self, "gate", self.table)]

    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        return self.contextual.publish(x, start, context) + self._added(x, context)

    def forward_flops(self, tokens: int) -> Flops:
        return self.contextual.forward_flops(tokens) + linear_flops(self.gate, tokens)

    def publish_flops(self, tokens: int) -> Flops:
        return self.contextual.publish_flops(tokens) + linear_flops(self.gate, tokens)

    def _added(self, x: Tensor, context: Context) -> Tensor:
        assert context.token_ids is not None  # the model has refused embeddings alone
        gate = LARGEST_GATE * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))
        rows = look_up(context.token_ids, self.table, self.sparse_gradients)
        return (gate[..., None] * rows.unflatten(-1, (gate.shape[-1], -1))).flatten(2)

    @property
    def tail_width(self) -> int:
        return self.contextual.tail_width
