"""The mixer: what a block does across tokens. Attention is one; a recurrent time mix is another."""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.state import State


class Mixer(nn.Module, abc.ABC):
    """Mixes information across the tokens of a sequence, with a state to go on from."""

    @abc.abstractmethod
    def forward(self, x: Tensor, context: Context, state: Any) -> tuple[Tensor, State]:
        """x (B, T, hidden_size), normalised -> (B, T, hidden_size) and the state after T tokens;
        state: what the last call returned, None at the start of a sequence."""

    @abc.abstractmethod
    def publish(self, embedding: Tensor, context: Context) -> Tensor:
        """Values that other layers may refer to, of the layer-normalised x0: (B, T, Hkv * Dv)."""

    @abc.abstractmethod
    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype) -> int:
        """A bound on the bytes that its state holds within the first `tokens` tokens."""

    @abc.abstractmethod
    def initialize(self, ratio: float) -> None:
        """Start values that differ from PyTorch's defaults, but for the output projection.

        ratio: 1 in the first layer, falling by 1 / layers from layer to layer.
        """

    @abc.abstractmethod
    def initialize_table(self, inputs: Callable[[], Tensor]) -> None:
        """Start values of a table over token ids, see `ValueSource.initialize_table`."""

    @property
    @abc.abstractmethod
    def output_projection(self) -> nn.Linear:
        """The last map back to the residual stream, which the paper starts at 0."""
