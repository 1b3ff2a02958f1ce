"""Axis 2: where a layer's values come from. The contract that every source meets."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meanbank.core.config import Tagged
from meanbank.core.context import Context
from meanbank.core.geometry import Geometry
from meanbank.core.state import State
from meanbank.core.values import Values


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands: its index, how many layers there are, the layer it refers back to.

    vocabulary: number of token ids; first_layer: the first layer with the same type of memory,
    whose values the gated residual mixes in.
    """

    layer: int
    num_layers: int
    first_layer: int
    vocabulary: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueSourceConfig(Tagged, kind="value source"):
    """Settings of a value source; `build` makes the module."""

    needs_token_ids: ClassVar[bool] = False

    @abc.abstractmethod
    def build(self, geometry: Geometry, place: Place) -> "ValueSource": ...

    def refers_to(self, place: Place) -> int | None:
        """The layer whose published values this source reads, if any."""
        return None


class ValueSource(nn.Module, abc.ABC):
    """Gives a layer the values of its tokens."""

    @abc.abstractmethod
    def forward(self, x: Tensor, context: Context, state: Any) -> tuple[Values, State | None]:
        """Values of T tokens. x (B, T, hidden_size): the layer's normalised input; state: what
        the last call returned, None at the start."""

    @abc.abstractmethod
    def publish(self, embedding: Tensor, context: Context) -> Tensor:
        """What other layers read of this one: its values for the layer-normalised x0
        (B, T, hidden_size), without residual and shift: (B, T, Hkv * Dv)."""

    @abc.abstractmethod
    def initialize(self, ratio: float) -> None:
        """Start values that differ from PyTorch's defaults; ratio falls from 1 in layer 0."""

    def initialize_table(self, inputs: Callable[[], Tensor]) -> None:
        """Start values of a table over token ids, if it has one.

        inputs: gives the layer's input at step 0 for every token id alone
        (vocabulary, hidden_size); called only where a table has to be filled.
        """

    @abc.abstractmethod
    def stored_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes that a memory's state keeps for one token of one sequence."""

    @property
    @abc.abstractmethod
    def tail_width(self) -> int:
        """Numbers that its own state holds for one sequence."""
