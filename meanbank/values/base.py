"""Axis 2: where a layer's values come from. The contract that every source meets."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.config import Tagged
from meanbank.core.context import Context
from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.state import State
from meanbank.core.table import Table
from meanbank.core.tail import tail_like
from meanbank.core.values import Values
from meanbank.values.parts import Part


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands.

    layer: its index; num_layers: how many there are; vocabulary: number of token ids.
    first_layer: the first layer with the same type of memory, whose values the value residual and
    the source `first_layer` read unless told otherwise.
    publishes: whether some layer reads this one's values.
    """

    layer: int
    num_layers: int
    first_layer: int
    vocabulary: int
    publishes: bool = False

    def of_part(self) -> "Place":
        """The place of a source inside the layer's own, which alone publishes."""
        return dataclasses.replace(self, publishes=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueSourceConfig(Tagged, kind="value source"):
    """Settings of a value source; `build` makes the module.

    needs_token_ids: embeddings alone do not do.
    reads_stream: values depend on the layer's input; without it they are free of context.
    """

    needs_token_ids: ClassVar[bool] = False
    reads_stream: ClassVar[bool] = True

    @abc.abstractmethod
    def build(self, geometry: Geometry, place: Place) -> "ValueSource": ...

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> Self:
        """The same with everything filled in that was left open.

        first_layer: the first layer with the same type of memory.
        """
        return self

    def takes_over(self, first_layer: int) -> int | None:
        """The layer whose values it gives in place of the layer's own; an earlier one, if any."""
        return None

    def refers_to(self, place: Place) -> frozenset[int]:
        """The layers whose published values this source reads."""
        return frozenset()

    @property
    def uses_shared_table(self) -> bool:
        """Whether it reads the table over token ids that layers share."""
        return False


class ValueSource(nn.Module, abc.ABC):
    """Gives a layer the values of its tokens.

    sparse_gradients: whether its look-ups give tables sparse gradients. Not a setting, for it
    changes what training costs and nothing else: `set_table_gradients` sets it.
    """

    def __init__(self, geometry: Geometry, place: Place) -> None:
        super().__init__()
        self.geometry, self.place = geometry, place
        self.sparse_gradients = False

    @abc.abstractmethod
    def forward(
        self, x: Tensor, start: Tensor | None, context: Context, state: Any
    ) -> tuple[Values, State | tuple | None]:
        """Values of T tokens.

        x (B, T, hidden_size): the layer's normalised input; start: the same norm of x0, given where
        `uses_start`; state: what the last call returned, None at the start of a sequence.
        """

    @abc.abstractmethod
    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        """What other layers read of this one: its values for x0 in place of the stream, without
        residual and shift, (B, T, Hkv * Dv).

        x and start as in `forward`, both from x0; they differ where the mixer shifts its inputs.
        """

    @abc.abstractmethod
    def forward_flops(self, tokens: int) -> Flops:
        """FLOPs of `forward` for `tokens` tokens, and of its backward pass."""

    @abc.abstractmethod
    def publish_flops(self, tokens: int) -> Flops:
        """FLOPs of `publish` for `tokens` tokens, and of its backward pass."""

    def flops(self, tokens: int) -> Flops:
        """FLOPs of a sequence of `tokens` tokens: the layer's values, and those it publishes."""
        own = self.forward_flops(tokens)
        return own + self.publish_flops(tokens) if self.place.publishes else own

    def initialize(self, ratio: float) -> None:
        """Start values that differ from PyTorch's defaults; ratio falls from 1 in layer 0."""

    def initialize_table(
        self,
        inputs: Callable[[], Tensor],
        draw: Callable[[int, int], Tensor],
        shared: nn.Parameter | None = None,
    ) -> None:
        """Start values of a table over token ids, if it has one.

        inputs: gives the layer's input at step 0 for every token id alone
        (vocabulary, hidden_size), called only where a table has to be filled; draw: a fresh
        projection (width, hidden_size) as the backbone draws them; shared: the table that layers
        share, for the first of them to fill.
        """

    def parts(self, shared: Table | None) -> list[Part]:
        """What its values are put together from, where a coefficient or a gate scales each.

        shared: the table that layers share.
        """
        return []

    @property
    def uses_start(self) -> bool:
        """Whether `forward` reads the layer-normalised x0."""
        return False

    @property
    def stores_token_ids(self) -> bool:
        """Whether a memory's state keeps ids in place of values."""
        return False

    def stored_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes that a memory's state keeps for one token of one sequence."""
        if self.stores_token_ids:
            return torch.int32.itemsize
        return self.geometry.value_width * dtype.itemsize

    def stored_like(self, batch: int, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor without data of the form in which a memory keeps `tokens` tokens."""
        if self.stores_token_ids:
            return torch.empty(batch, tokens, dtype=torch.int32, device="meta")
        shape = (batch, self.geometry.num_kv_heads, tokens, self.geometry.value_dim)
        return torch.empty(shape, dtype=dtype, device="meta")

    def state_like(self, batch: int, dtype: torch.dtype) -> Any:
        """What it carries on after some token of `batch` rows, without data."""
        return tail_like(batch, self.tail_width, dtype)

    @property
    def tail_width(self) -> int:
        """Numbers that its own state holds for one sequence."""
        return 0


def learned_or(fixed: float, learned: bool) -> nn.Parameter | float:
    """A scalar factor of values: a parameter that starts at 1, or a fixed number."""
    return nn.Parameter(torch.ones(())) if learned else fixed


def scaled(values: Tensor, factor: Tensor | float) -> Tensor:
    """values times the factor, without a copy where it is 1."""
    return values if isinstance(factor, float) and factor == 1.0 else values * factor


def restart(factor: nn.Parameter | float) -> None:
    """A learned factor starts at 1."""
    if isinstance(factor, nn.Parameter):
        init.ones_(factor)
