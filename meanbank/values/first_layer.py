"""Values of an earlier layer, used again (the BoV paper's `V1`, section 4)."""

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.values import DenseValues
from meanbank.values.base import Place, ValueSource, ValueSourceConfig, learned_or, restart, scaled
from meanbank.values.parts import Scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstLayer(ValueSourceConfig, tag="first_layer"):
    """The values that an earlier layer has for x0, without residual and shift, times a scale.

    layer: which one; default the first layer with the same type of memory. Never a layer's own.
    scale: one learned number (the default), one a key/value head, both from 1, or fixed at 1.
    """

    reads_stream: ClassVar[bool] = False

    layer: int | None = None
    scale: Literal["learned", "fixed", "per_head"] | None = None

    def __post_init__(self) -> None:
        if self.layer is not None and self.layer < 0:
            raise ValueError(f"layer must not be negative, got {self.layer}")

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> "FirstLayer":
        return dataclasses.replace(
            self, scale=self.scale or "learned", layer=self.takes_over(first_layer)
        )

    def build(self, geometry: Geometry, place: Place) -> "FirstLayerValues":
        return FirstLayerValues(self, geometry, place)

    def takes_over(self, first_layer: int) -> int:
        return first_layer if self.layer is None else self.layer

    def refers_to(self, place: Place) -> frozenset[int]:
        return frozenset({self.takes_over(place.first_layer)})


class FirstLayerValues(ValueSource):
    """Parameters: a learned scale, () or (Hkv,)."""

    def __init__(self, config: FirstLayer, geometry: Geometry, place: Place) -> None:
        super().__init__(geometry, place)
        self.source = config.takes_over(place.first_layer)
        self.scale: nn.Parameter | float = learned_or(1.0, config.scale != "fixed")
        if config.scale == "per_head":
            self.scale = nn.Parameter(torch.ones(geometry.num_kv_heads))

    def initialize(self, ratio: float) -> None:
        restart(self.scale)

    def forward(self, x, start, context, state):
        values = split_heads(context.first_values[self.source], self.geometry.num_kv_heads)
        return DenseValues(self._scaled(values)), None

    def parts(self, shared):
        return [Scaled("first_layer", self, "scale")]

    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        values = context.first_values[self.source].unflatten(-1, (self.geometry.num_kv_heads, -1))
        return self._scaled(values.transpose(1, 2)).transpose(1, 2).flatten(2)

    def forward_flops(self, tokens: int) -> Flops:
        return Flops()  # counted where they are made

    def publish_flops(self, tokens: int) -> Flops:
        return Flops()

    def _scaled(self, values: Tensor) -> Tensor:
        """values (B, Hkv, T, Dv) times the scale."""
        scale = self.scale
        return scaled(values, scale.view(-1, 1, 1) if isinstance(scale, Tensor) else scale)
