"""Values projected from the initial embedding (the BoV paper's `x0 W_V`, section 4)."""

import dataclasses
from typing import ClassVar, Literal

from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.values import DenseValues
from meanbank.values.base import Place, ValueSource, ValueSourceConfig, learned_or, restart, scaled
from meanbank.values.parts import Scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialEmbedding(ValueSourceConfig, tag="initial_embedding"):
    """`V = norm(x0) W_V` with this layer's norm and projection, without residual and shift.

    scale: one learned number (starts at 1; the default), or fixed at 1.
    """

    reads_stream: ClassVar[bool] = False

    scale: Literal["learned", "fixed"] | None = None

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> "InitialEmbedding":
        return dataclasses.replace(self, scale=self.scale or "learned")

    def build(self, geometry: Geometry, place: Place) -> "InitialEmbeddingValues":
        return InitialEmbeddingValues(self, geometry, place)


class InitialEmbeddingValues(ValueSource):
    """Parameters: W_V and a learned scale."""

    def __init__(self, config: InitialEmbedding, geometry: Geometry, place: Place) -> None:
        super().__init__(geometry, place)
        self.projection = nn.Linear(geometry.hidden_size, geometry.value_width, bias=False)
        self.scale = learned_or(1.0, config.scale != "fixed")

    def initialize(self, ratio: float) -> None:
        restart(self.scale)

    @property
    def uses_start(self) -> bool:
        return True

    def forward(self, x, start, context, state):
        assert start is not None  # `uses_start`
        values = self.publish(x, start, context)
        return DenseValues(split_heads(values, self.geometry.num_kv_heads)), None

    def parts(self, shared):
        return [Scaled("initial_embedding", self, "scale")]

    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        return scaled(self.projection(start), self.scale)

    def forward_flops(self, tokens: int) -> Flops:
        return linear_flops(self.projection, tokens)

    def publish_flops(self, tokens: int) -> Flops:
        return linear_flops(self.projection, tokens)
