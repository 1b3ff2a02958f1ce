"""Values projected from the residual stream: the standard."""

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.context import Context
from meanbank.core.conventions import Conventions, TokenShift, ValueResidual
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.values import DenseValues
from meanbank.ops.token_shift import shift_start, token_shift
from meanbank.values.base import Place, ValueSource, ValueSourceConfig, learned_or, restart, scaled
from meanbank.values.low_rank import LowRank, rounded_rank


def residual_rank(width: int) -> int:
    """Rank of the value residual's gate: 32 at width 768 (KVM paper, appendix)."""
    return rounded_rank(1.3 * width**0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projected(ValueSourceConfig, tag="projection"):
    """`V = x W_V`, then the value residual, then the token shift.

    residual: "gated" moves V towards the first layer's values by a learned, token-dependent gate,
    "linear" by one learned number (from 0.5), "none" leaves it. Both do nothing in the first layer.
    shift: "learned" moves each token's values towards the previous token's, "none" leaves them.
    Both default to the backbone's habit: gated and learned on gptalpha2, none on nanochat.
    scale: "learned" multiplies the projection by one number, which starts at 1.
    """

    residual: ValueResidual | None = None
    shift: TokenShift | None = None
    scale: Literal["none", "learned"] = "none"

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> "Projected":
        return dataclasses.replace(
            self,
            residual=self.residual or conventions.value_residual,
            shift=self.shift or conventions.token_shift,
        )

    def build(self, geometry: Geometry, place: Place) -> "ProjectedValues":
        return ProjectedValues(self, geometry, place)

    def refers_to(self, place: Place) -> frozenset[int]:
        return frozenset() if self.residual in (None, "none") else frozenset({place.first_layer})


class ProjectedValues(ValueSource):
    """Parameters: W_V and, where they are learned, scale, residual and token-shift mix.

    With a shift it carries what the next token is shifted towards.
    """

    def __init__(self, config: Projected, geometry: Geometry, place: Place) -> None:
        super().__init__(geometry, place)
        width = geometry.value_width
        self.projection = nn.Linear(geometry.hidden_size, width, bias=False)
        self.scale = learned_or(1.0, config.scale == "learned")
        self.shift = nn.Parameter(torch.empty(width)) if config.shift == "learned" else None
        self.residual = None
        if config.residual == "gated":
            self.residual = GatedResidual(geometry.hidden_size, width)
        elif config.residual == "linear":
            self.residual = LinearResidual()

    def forward(self, x, start, context, state):
        initial = self.place.layer == 0  # where the layer's input is x0
        if initial and self.place.publishes:
            values = context.first_values[0]
        else:
            values = scaled(self.projection(x), self.scale)
        if self.residual is not None:
            first = values if initial else context.first_values[self.place.first_layer]
            values = self.residual.mix(x, values, first)
        if self.shift is None:
            return DenseValues(split_heads(values, self.geometry.num_kv_heads)), None
        shifted = token_shift(values, self.shift, context.layout.before(values, state, zero=False))
        heads = split_heads(shifted, self.geometry.num_kv_heads)
        return DenseValues(heads), context.layout.last(values, state)

    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        return scaled(self.projection(x), self.scale)

    def forward_flops(self, tokens: int) -> Flops:
        flops = Flops()
        if not (self.place.publishes and self.place.layer == 0):  # published ones are the layer's
            flops += linear_flops(self.projection, tokens)
        if self.residual is not None:
            flops += self.residual.flops(tokens)
        return flops

    def publish_flops(self, tokens: int) -> Flops:
        return linear_flops(self.projection, tokens)

    def initialize(self, ratio: float) -> None:
        restart(self.scale)
        if self.shift is not None:
            init.copy_(self.shift, shift_start(self.shift, 0.7 * ratio))
        if self.residual is not None:
            self.residual.initialize()

    @property
    def tail_width(self) -> int:
        return 0 if self.shift is None else len(self.shift)


class GatedResidual(LowRank):
    """`v + (v_first - v) * sigmoid(base + W2 W1 x)`."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__(hidden_size, residual_rank(hidden_size), width)

    def initialize(self, base: Tensor | None = None) -> None:
        assert self.base is not None
        ramp = torch.linspace(-0.5, 0.5, len(self.base), device=self.base.device)
        super().initialize(0.73 - 0.4 * ramp)

    def mix(self, x: Tensor, values: Tensor, first: Tensor) -> Tensor:
        gate = torch.sigmoid(self(x))
        return torch.lerp(values, first.to(values.dtype), gate.to(values.dtype))


class LinearResidual(nn.Module):
    """`(1 - share) v + share v_first`, one learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.empty(()))

    def initialize(self) -> None:
        init.constant_(self.share, 0.5)

    def mix(self, x: Tensor, values: Tensor, first: Tensor) -> Tensor:
        return torch.lerp(values, first.to(values.dtype), self.share.to(values.dtype))

    def flops(self, tokens: int) -> Flops:
        """Nothing but elementwise work."""
        return Flops()
