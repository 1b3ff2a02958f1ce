"""Axis 1: how a layer remembers the past. The contract that every memory meets."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meanbank.core.config import Tagged
from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops, products
from meanbank.core.geometry import Geometry
from meanbank.core.layout import Span
from meanbank.core.state import State, check_like
from meanbank.core.values import Values


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Tagged, kind="memory"):
    """Settings of a memory; `build` makes the module.

    has_address: whether its layers make queries and keys as an address says.
    """

    has_address: ClassVar[bool] = True

    @abc.abstractmethod
    def build(self, geometry: Geometry) -> "Memory": ...

    def conventions(self, backbone: Conventions) -> Conventions:
        """What the layer does where its plan leaves a setting open; the backbone's by default."""
        return backbone

    def rows_wanted(self, seen: int) -> int | None:
        """Compressed rows that its budget allowed when it last took tokens in, `seen` tokens after
        the start; None for a memory without a budget."""
        return None

    @property
    def size_setting(self) -> str | None:
        """Dotted name of the one number that says how much it holds; None where there is none."""
        return None

    @property
    def first_rows(self) -> int:
        """Compressed rows that it starts with, whatever its budget says."""
        return 0

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError where the settings do not fit a layer's sizes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a memory holds of each of its sequences.

    exact: tokens that it holds as they are; rows: compressed ones, for `older` earlier tokens.
    """

    exact: int
    rows: int = 0
    older: int = 0


class MemoryState(State, abc.ABC):
    """State of a memory, which can say what it holds."""

    @abc.abstractmethod
    def usage(self) -> Usage: ...


class Memory(nn.Module, abc.ABC):
    """Remembers keys and values of earlier tokens and answers queries with weighted sums.

    A memory keeps key/value heads apart from each other and rows of a batch apart from each other.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    @abc.abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        values: Values,
        gate_input: Tensor,
        state: Any,
        span: Span,
    ) -> tuple[Tensor, State]:
        """Attend from T new tokens and remember them.

        query (B, H, T, Dk) and key (B, Hkv, T, Dk) after rotary positions; values of the same
        tokens; gate_input (B, T, hidden_size), what the layer saw; state: what the last call
        returned, None at the start of a sequence; span: where the tokens stand, and how many of
        them the new state has to be able to forget. Returns (B, H, T, Dv) and the new state; the
        old one stays valid.
        """

    def initialize(self) -> None:
        """Start values that differ from PyTorch's defaults."""

    @property
    def exact_tokens(self) -> int | None:
        """Tokens up to which it is exact attention and nothing else; None if it is always."""
        return None

    @abc.abstractmethod
    def rows_max(self, tokens: int) -> int:
        """A bound on the key/value rows that a query reads within the first `tokens` tokens."""

    @abc.abstractmethod
    def held_after(self, tokens: int) -> Usage:
        """What its state holds after exactly `tokens` tokens, where it can forget none of them."""

    @abc.abstractmethod
    def held_max(self, tokens: int, undo: int = 0) -> Usage:
        """A bound on what its state holds within the first `tokens` tokens.

        undo: how many tokens the state can forget again.
        """

    @abc.abstractmethod
    def state_like(
        self, tokens: int, batch: int, dtype: torch.dtype, stored: Callable[[int], Tensor]
    ) -> MemoryState:
        """The state after exactly `tokens` tokens without data, on torch's meta device.

        stored: as for `check_state`.
        """

    def nbytes_by_part(
        self, held: Usage, batch: int, dtype: torch.dtype, value_nbytes: int
    ) -> dict[str, int]:
        """Bytes of what a state holds, by the parts that `State.nbytes_by_part` tells apart.

        held: of each sequence; value_nbytes: what the value source stores for one of its tokens.
        """
        return {
            "rows": batch * held.rows * self.row_nbytes(dtype),
            "exact tokens": batch * held.exact * (self.token_nbytes(dtype) + value_nbytes),
        }

    def nbytes_max(
        self, tokens: int, batch: int, dtype: torch.dtype, value_nbytes: int, undo: int = 0
    ) -> int:
        """A bound on the bytes that its state holds within the first `tokens` tokens.

        value_nbytes: what the value source stores for one token of one sequence; undo: how many
        tokens the state can forget again.
        """
        held = self.held_max(tokens, undo)
        return sum(self.nbytes_by_part(held, batch, dtype, value_nbytes).values())

    @abc.abstractmethod
    def flops(self, tokens: int) -> Flops:
        """FLOPs of reading and remembering one sequence of `tokens` tokens, from empty.

        Only (query, row) pairs that the memory shows count, not what a backend masks out.
        """

    def check_state(
        self, state: Any, batch: int, seen: int, stored: Callable[[int], Tensor]
    ) -> None:
        """Raise ValueError unless `state` is one that `seen` tokens of `batch` rows can leave.

        Tensors may be on torch's meta device, without data. stored: a tensor without data in the
        form in which the value source keeps so many tokens.
        """
        check_like(state, self.state_like(seen, batch, torch.float32, stored))

    def read_flops(self, pairs: int) -> Flops:
        """FLOPs of scores and weighted sums for so many (query, visible row) pairs a head."""
        sizes = self.geometry
        return products(pairs * sizes.num_heads * (sizes.key_dim + sizes.value_dim))

    def similarity_flops(self, pairs: int) -> Flops:
        """FLOPs of so many (written key, row) similarities a head, which have no gradient."""
        return products(pairs * self.geometry.key_width, learns=False)

    def token_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one exact token but for its values, all heads: its keys."""
        return self.geometry.key_width * dtype.itemsize

    def row_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one compressed row, all heads, where there are any."""
        return 0

    def empty(self, batch: int, count: int, width: int, dtype: torch.dtype) -> Tensor:
        """A tensor (B, Hkv, count, width) without data."""
        shape = (batch, self.geometry.num_kv_heads, count, width)
        return torch.empty(shape, dtype=dtype, device="meta")
