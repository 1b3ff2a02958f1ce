"""The mixer: what a block does across tokens. Attention is one; a recurrent time mix is another."""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.state import State, check_like
from meanbank.model.backbone import Backbone
from meanbank.model.plan import LayerPlan
from meanbank.values import Place, ValueSource


class Mixer(nn.Module, abc.ABC):
    """Mixes information across the tokens of a sequence, with a state to go on from."""

    values: ValueSource

    def __init__(
        self, plan: LayerPlan, geometry: Geometry, place: Place, backbone: Backbone
    ) -> None:
        super().__init__()
        self.geometry, self.place = geometry, place

    @abc.abstractmethod
    def forward(
        self, x: Tensor, start: Tensor | None, context: Context, state: Any
    ) -> tuple[Tensor, State]:
        """x (B, T, hidden_size), normalised -> (B, T, hidden_size) and the state after T tokens;
        start: the same norm of x0, given where `uses_start` or the layer publishes its values;
        state: what the last call returned, None at the start of a sequence."""

    @abc.abstractmethod
    def publish(self, start: Tensor, context: Context, state: Any) -> Tensor:
        """Values that other layers may refer to, of the layer-normalised x0: (B, T, Hkv * Dv)."""

    @abc.abstractmethod
    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, undo: int = 0) -> int:
        """A bound on the bytes that its state holds within the first `tokens` tokens, where `undo`
        of them can be forgotten."""

    @abc.abstractmethod
    def state_like(self, tokens: int, batch: int, dtype: torch.dtype) -> State:
        """The state after exactly `tokens` tokens of `batch` rows, none of which can be forgotten:
        without data, on torch's meta device."""

    def check_state(self, state: Any, seen: tuple[int, ...]) -> None:
        """Raise ValueError unless `state` is one that so many tokens of each row can leave.

        A context file is checked with it, first without data (tensors on torch's meta device).
        """
        check_like(state, self.state_like(max(seen), len(seen), torch.float32))

    @abc.abstractmethod
    def flops_by_part(self, tokens: int) -> dict[str, Flops]:
        """FLOPs of one sequence of `tokens` tokens: attention, projections and values."""

    def flops(self, tokens: int) -> Flops:
        """FLOPs of one sequence of `tokens` tokens."""
        return sum(self.flops_by_part(tokens).values(), Flops())

    @abc.abstractmethod
    def initialize(self, ratio: float) -> None:
        """Start values that differ from the backbone's, but for the output projection.

        ratio: 1 in the first layer, falling by 1 / layers from layer to layer.
        """

    @property
    @abc.abstractmethod
    def output_projection(self) -> nn.Linear:
        """The last map back to the residual stream, which the papers start at 0."""

    @property
    def uses_start(self) -> bool:
        """Whether `forward` reads the layer-normalised x0."""
        return self.values.uses_start

    def initialize_table(
        self,
        inputs: Callable[[], Tensor],
        draw: Callable[[int, int], Tensor],
        shared: nn.Parameter | None,
    ) -> None:
        """Start values of a table over token ids, see `ValueSource.initialize_table`."""
        self.values.initialize_table(inputs, draw, shared)
