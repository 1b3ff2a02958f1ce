"""Values: what attention sums up, however a layer came by them.

A memory asks for three things only and so never learns whether a bank is behind them: the dense
values, what has to be stored to have them again later, and the same values preceded by stored ones.
"""

import abc
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meanbank.core.bags import numbers, sums_of_rows, sums_of_tokens
from meanbank.core.geometry import split_heads
from meanbank.core.room import appended
from meanbank.core.table import Table, floating, look_up, weights_of


class Values(abc.ABC):
    """Values of T consecutive tokens."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """(B, Hkv, T, Dv)."""

    @abc.abstractmethod
    def stored(self, index: Tensor | None = None) -> Tensor:
        """What a state keeps of the tokens `index` (all by default): one tensor, batch first.

        Its tokens stand in dimension 1 if it has two dimensions, else in the last but one.
        """

    @abc.abstractmethod
    def part(self, rows: Tensor, start: int, stop: int) -> "Values":
        """The values of tokens [start, stop) of some batch rows (R,)."""

    @abc.abstractmethod
    def after(self, stored: Tensor | None) -> "Values":
        """These values preceded by the tokens that `stored`, as `stored()` gave it, stands for."""

    @abc.abstractmethod
    def standing_for(self, stored: Tensor) -> "Values":
        """The values of just the tokens that `stored`, as `stored()` gave it, stands for."""

    @abc.abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sums over the T tokens with weights (B, H, T), H a multiple of Hkv: (B, H, Dv).

        On a CPU, without gradients; dense values of a bank are not made.
        """

    @abc.abstractmethod
    def appended_to(self, stored: Tensor, block: int, dense: Tensor | None = None) -> Tensor:
        """`stored`, followed by what it keeps of these tokens, see `room.appended`.

        dense: all of these values together, where they are at hand, in a dtype that may be another.
        """

    @property
    @abc.abstractmethod
    def weights(self) -> tuple[Tensor, ...]:
        """Those that what is stored depends on in order to be dense."""


@dataclasses.dataclass(frozen=True)
class DenseValues(Values):
    """Values as a tensor (B, Hkv, T, Dv)."""

    tensor: Tensor

    def dense(self) -> Tensor:
        return self.tensor

    def stored(self, index: Tensor | None = None) -> Tensor:
        return self.tensor if index is None else self.tensor.index_select(2, index)

    def part(self, rows: Tensor, start: int, stop: int) -> "DenseValues":
        return DenseValues(self.tensor[rows, :, start:stop])

    def after(self, stored: Tensor | None) -> "DenseValues":
        if stored is None:
            return self
        return DenseValues(torch.cat([stored.to(self.tensor.dtype), self.tensor], dim=2))

    def standing_for(self, stored: Tensor) -> "DenseValues":
        return DenseValues(stored)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        batch, heads, count, width = self.tensor.shape
        grouped = weights.view(batch * heads, -1, count).to(self.tensor.dtype)
        values = self.tensor
        if values.stride()[2:] != (width, 1):
            values = values.contiguous()
        values = values.flatten(0, 1)
        read = sums_of_tokens if grouped.shape[1] == 1 else torch.bmm
        return read(grouped, values).view(batch, -1, width)

    def appended_to(self, stored: Tensor, block: int, dense: Tensor | None = None) -> Tensor:
        if dense is not None and dense.dtype == self.tensor.dtype:
            return dense
        return appended(stored.to(self.tensor.dtype), self.tensor, 2, block)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return ()


@dataclasses.dataclass(frozen=True)
class BankedValues(Values):
    """Values `scale * table[token_ids]`: only the ids (B, T) need to be stored.

    table: (vocabulary, Hkv * Dv); scale: one number; sparse_gradient: whether the table gets one.
    """

    token_ids: Tensor
    table: Table
    scale: Tensor | float
    num_kv_heads: int
    sparse_gradient: bool = False

    def dense(self) -> Tensor:
        rows = look_up(self.token_ids, self.table, self.sparse_gradient)
        return split_heads(rows * self.scale, self.num_kv_heads)

    def stored(self, index: Tensor | None = None) -> Tensor:
        ids = self.token_ids if index is None else self.token_ids.index_select(1, index)
        return ids.to(torch.int32, copy=True)  # never the caller's own tensor

    def part(self, rows: Tensor, start: int, stop: int) -> "BankedValues":
        return dataclasses.replace(self, token_ids=self.token_ids[rows, start:stop])

    def after(self, stored: Tensor | None) -> "BankedValues":
        if stored is None:
            return self
        ids = torch.cat([stored.to(self.token_ids.dtype), self.token_ids], dim=1)
        return dataclasses.replace(self, token_ids=ids)

    def standing_for(self, stored: Tensor) -> "BankedValues":
        return dataclasses.replace(self, token_ids=stored)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        heads, table = self.num_kv_heads, floating(self.table)
        if table is None:
            return DenseValues(self.dense()).weighted_sum(weights)
        table = table.reshape(-1, table.shape[1] // heads)  # a row for each head of an id
        rows = (
            self.token_ids.int()[:, None, None] * heads
            + numbers(heads, table.device)[:, None, None]
        )
        grouped = weights.view(len(weights), heads, -1, weights.shape[-1]).to(table.dtype)
        sums = sums_of_rows(table, rows.expand_as(grouped), grouped)
        return sums.flatten(1, 2) * self.scale

    def appended_to(self, stored: Tensor, block: int, dense: Tensor | None = None) -> Tensor:
        return appended(stored, self.token_ids.to(stored.dtype), 1, block)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        table = weights_of(self.table)
        return (*table, self.scale) if isinstance(self.scale, Tensor) else table


def banked(
    token_ids: Tensor,
    table: Table,
    scale: Tensor | float,
    num_kv_heads: int,
    sparse_gradient: bool = False,
) -> Values:
    """`BankedValues`, or dense ones where the table is divided over ranks.

    Its ranks have to look rows up equally often, however often a memory asks for its values.
    """
    values = BankedValues(token_ids, table, scale, num_kv_heads, sparse_gradient)
    return DenseValues(values.dense()) if isinstance(table, DTensor) else values


def token_dim(stored: Tensor) -> int:
    """The dimension in which the tokens of stored values stand."""
    return 1 if stored.ndim == 2 else stored.ndim - 2


def joined(stored: Sequence[Tensor], count: int) -> Tensor:
    """The first `count` tokens of stored values that follow each other, without spare storage."""
    dim = token_dim(stored[0])
    return torch.cat(list(stored), dim).narrow(dim, 0, count).clone()


def selected(stored: Tensor, index: Tensor) -> Tensor:
    """The tokens `index` of stored values."""
    return stored.index_select(token_dim(stored), index.to(stored.device))
