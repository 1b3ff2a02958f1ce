"""Mixtures of contextual values and those of another source (the BoV paper's section 4)."""

import dataclasses
from typing import Literal

from torch import nn
from transformers import initialization as init

from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.values import DenseValues
from meanbank.values.bank import Bank
from meanbank.values.base import Place, ValueSource, ValueSourceConfig, learned_or, restart
from meanbank.values.first_layer import FirstLayer
from meanbank.values.initial_embedding import InitialEmbedding
from meanbank.values.parts import Scaled
from meanbank.values.projected import Projected

OTHERS = (Bank, FirstLayer, InitialEmbedding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(ValueSourceConfig, tag="mixed"):
    """`V = a contextual + b other`.

    contextual: the layer's projected values, with their residual and shift.
    other: a bank, first_layer or initial_embedding, without a scale of its own, for b scales it.
        initial_embedding shares the layer's W_V with the contextual part.
    coefficients: learned, from a = 1 and b = 0, or fixed at 0.5 each.
    """

    other: ValueSourceConfig
    contextual: Projected = Projected()
    coefficients: Literal["learned", "fixed"] = "learned"

    def __post_init__(self) -> None:
        if not isinstance(self.other, OTHERS):
            choices = ", ".join(source.tag for source in OTHERS)
            raise ValueError(f"other must be one of {choices}, got {self.other.tag}")
        if self.other.scale is None:
            other = dataclasses.replace(self.other, scale="fixed")
            object.__setattr__(self, "other", other)
        elif self.other.scale != "fixed":
            raise ValueError(
                f"other.scale must be fixed, for b scales it already; got {self.other.scale!r}"
            )
        if self.contextual.scale != "none":
            raise ValueError("contextual.scale must be none, for a scales it already")

    @property
    def needs_token_ids(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.other.needs_token_ids

    @property
    def uses_shared_table(self) -> bool:
        return self.other.uses_shared_table

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> "Mixed":
        return dataclasses.replace(
            self,
            contextual=self.contextual.resolved(conventions),
            other=self.other.resolved(conventions, first_layer),
        )

    def build(self, geometry: Geometry, place: Place) -> "MixedValues":
        return MixedValues(self, geometry, place)

    def takes_over(self, first_layer: int) -> int | None:
        return self.other.takes_over(first_layer)

    def refers_to(self, place: Place) -> frozenset[int]:
        return self.contextual.refers_to(place) | self.other.refers_to(place)


class MixedValues(ValueSource):
    """Parameters: those of both parts, and the learned coefficients a and b."""

    def __init__(self, config: Mixed, geometry: Geometry, place: Place) -> None:
        super().__init__(geometry, place)
        self.contextual = config.contextual.build(geometry, place.of_part())
        self.other = None  # initial_embedding: the contextual part's own projection of x0
        if not isinstance(config.other, InitialEmbedding):
            self.other = config.other.build(geometry, place.of_part())
        self.name_of_other = config.other.tag
        learned = config.coefficients == "learned"
        self.contextual_weight = learned_or(0.5, learned)
        self.other_weight = learned_or(0.5, learned)

    def initialize(self, ratio: float) -> None:
        self.contextual.initialize(ratio)
        if self.other is not None:
            self.other.initialize(ratio)
        restart(self.contextual_weight)
        if isinstance(self.other_weight, nn.Parameter):
            init.zeros_(self.other_weight)

    def initialize_table(self, inputs, draw, shared=None):
        if self.other is not None:  # the table starts from the W_V that stays
            weight = self.contextual.projection.weight
            self.other.initialize_table(inputs, lambda *shape: weight, shared)

    @property
    def uses_start(self) -> bool:
        return self.other is None

    def forward(self, x, start, context, state):
        contextual, state = self.contextual(x, start, context, state)
        if self.other is None:
            other = split_heads(self._initial(start, context), self.geometry.num_kv_heads)
        else:
            other = self.other(x, start, context, None)[0].dense()
        mixed = self.contextual_weight * contextual.dense() + self.other_weight * other
        return DenseValues(mixed), state

    def parts(self, shared):
        """Both, under the names of the plan: the other's own scale is 1."""
        (table,) = [part.table for part in self.other.parts(shared)] if self.other else [None]
        return [
            Scaled("contextual", self, "contextual_weight"),
            Scaled(self.name_of_other, self, "other_weight", table),
        ]

    def publish(self, x, start, context):
        contextual = self.contextual.publish(x, start, context)
        if self.other is None:
            other = self._initial(start, context)
        else:
            other = self.other.publish(x, start, context)
        return self.contextual_weight * contextual + self.other_weight * other

    def _initial(self, start, context):
        """The layer's own projection of x0, (B, T, Hkv * Dv)."""
        return self.contextual.publish(start, start, context)

    def forward_flops(self, tokens: int) -> Flops:
        other = self.other  # without one, the contextual part projects x0 as well
        shared = self.contextual.publish_flops if other is None else other.forward_flops
        return self.contextual.forward_flops(tokens) + shared(tokens)

    def publish_flops(self, tokens: int) -> Flops:
        shared = (self.contextual if self.other is None else self.other).publish_flops
        return self.contextual.publish_flops(tokens) + shared(tokens)

    @property
    def tail_width(self) -> int:
        return self.contextual.tail_width
