"""Values projected from the residual stream: the standard."""

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.context import Context
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.state import State
from meanbank.core.values import DenseValues
from meanbank.ops.token_shift import shift_start, token_shift
from meanbank.values.base import Place, ValueSource, ValueSourceConfig


def low_rank(width: int) -> int:
    """Rank of the value residual's gate: 32 at width 768 (KVM paper, appendix)."""
    return max(32, 32 * round(1.3 * width**0.5 / 32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projected(ValueSourceConfig, tag="projection"):
    """`V = x W_V`, then the value residual, then the token shift.

    residual: "gated" moves V towards the first layer's values by a learned, token-dependent gate
    (the backbone's own, a no-op in the first layer itself); "none" leaves it.
    """

    residual: Literal["gated", "none"] = "gated"

    def build(self, geometry: Geometry, place: Place) -> "ProjectedValues":
        return ProjectedValues(self, geometry, place)

    def refers_to(self, place: Place) -> int | None:
        return place.first_layer if self.residual == "gated" else None


@dataclasses.dataclass(frozen=True)
class ShiftState(State):
    """last (B, 1, W): what the next token is shifted towards."""

    last: Tensor


class ProjectedValues(ValueSource):
    """Parameters: W_V, token-shift mix (Hkv * Dv,), and the gate of the value residual."""

    def __init__(self, config: Projected, geometry: Geometry, place: Place) -> None:
        super().__init__()
        self.geometry, self.place = geometry, place
        width = geometry.value_width
        self.projection = nn.Linear(geometry.hidden_size, width, bias=False)
        self.shift = nn.Parameter(torch.empty(width))
        self.residual = None
        if config.residual == "gated":
            self.residual = GatedResidual(geometry.hidden_size, width)

    def forward(self, x, context, state):
        if self.residual is None:
            values = self.projection(x)
        else:
            first = context.first_values[self.place.first_layer]
            values = first if self.place.layer == 0 else self.projection(x)
            values = self.residual(x, values, first)
        previous = values[:, :1] if state is None else state.last
        shifted = token_shift(values, self.shift, previous)
        heads = split_heads(shifted, self.geometry.num_kv_heads)
        return DenseValues(heads), ShiftState(values[:, -1:].clone())

    def publish(self, embedding: Tensor, context: Context) -> Tensor:
        return self.projection(embedding)

    def initialize(self, ratio: float) -> None:
        init.copy_(self.shift, shift_start(self.shift, 0.7 * ratio))
        if self.residual is not None:
            self.residual.initialize()

    def stored_nbytes(self, dtype: torch.dtype) -> int:
        return self.geometry.value_width * dtype.itemsize

    @property
    def tail_width(self) -> int:
        return len(self.shift)


class GatedResidual(nn.Module):
    """`v + (v_first - v) * sigmoid(base + W2 W1 x)`, W1 and W2 of low rank."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        rank = low_rank(hidden_size)
        self.base = nn.Parameter(torch.empty(width))
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def initialize(self) -> None:
        ramp = torch.linspace(-0.5, 0.5, len(self.base), device=self.base.device)
        init.copy_(self.base, (0.73 - 0.4 * ramp).to(self.base))
        init.zeros_(self.down.weight)
        init.orthogonal_(self.up.weight, gain=0.1)

    def forward(self, x: Tensor, values: Tensor, first: Tensor) -> Tensor:
        gate = torch.sigmoid(self.base + self.up(self.down(x)))
        return torch.lerp(values, first.to(values.dtype), gate.to(values.dtype))
