"""Full attention of one new token in plain PyTorch, as fast as we could make it.

One product reads all keys and one weighted sum all values, so their layout decides the speed: by
operand order and dtype the same bytes are read at 2 to 25 GB/s. Each layout is a small class; those
of a cache are chosen by timing them on the sizes at hand. N is batch and heads, D channels.
"""

import abc
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_TILE, VALUE_TILE = 128, 512  # tokens
TRIAL_BYTES = 2**27  # read between two reads of the same tensor, when layouts are chosen
TRIALS = 5


class Layout(abc.ABC):
    """Keys or values of up to `capacity` tokens, preallocated, in some order."""

    @abc.abstractmethod
    def __init__(self, dense: Tensor, capacity: int) -> None:
        """dense: (N, T, D), the tokens so far."""

    @abc.abstractmethod
    def write(self, at: int, row: Tensor) -> None:
        """Put one token's row (N, D) in place."""


class Keys(Layout):
    @abc.abstractmethod
    def scores(self, query: Tensor, count: int) -> Tensor:
        """query (N, D) on the first `count` keys: (N, count)."""


class SummedValues(Layout):
    @abc.abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """weights (N, count) of the first `count` values: (N, D)."""


class Rows(Layout):
    """(N, capacity, D), as any cache has them."""

    def __init__(self, dense: Tensor, capacity: int) -> None:
        self.rows = dense.new_zeros(dense.shape[0], capacity, dense.shape[2])
        self.rows[:, : dense.shape[1]] = dense

    def write(self, at: int, row: Tensor) -> None:
        self.rows[:, at] = row


class Tiles(Layout):
    """(tiles, N, D, tokens a tile): channels in rows, cut so that a row stays in the fast cache."""

    tile: int

    def __init__(self, dense: Tensor, capacity: int) -> None:
        heads, length, width = dense.shape
        count = -(-capacity // self.tile)
        self.tiles = dense.new_zeros(count, heads, width, self.tile)
        for number in range(-(-length // self.tile)):
            part = dense[:, number * self.tile : (number + 1) * self.tile]
            self.tiles[number, :, :, : part.shape[1]] = part.mT

    def write(self, at: int, row: Tensor) -> None:
        self.tiles[at // self.tile, :, :, at % self.tile] = row

    def upto(self, count: int) -> Tensor:
        """The tiles that hold the first `count` tokens."""
        return self.tiles[: -(-count // self.tile)]


class KeyRows(Rows, Keys):
    """Keys times the query as a column: in this order the product reads whole rows."""

    def scores(self, query: Tensor, count: int) -> Tensor:
        return torch.bmm(self.rows[:, :count], query[:, None].mT)[..., 0]


class KeyTiles(Tiles, Keys):
    """Channels of a tile summed up with the query's numbers as weights, by `embedding_bag`."""

    tile = KEY_TILE

    def __init__(self, dense: Tensor, capacity: int) -> None:
        super().__init__(dense, capacity)
        device, width = dense.device, dense.shape[2]
        bags = self.tiles.shape[0] * self.tiles.shape[1]
        self.index = torch.arange(bags * width, dtype=torch.int32, device=device)
        self.offsets = torch.arange(0, bags * width, width, dtype=torch.int32, device=device)

    def scores(self, query: Tensor, count: int) -> Tensor:
        tiles = self.upto(count)
        number, heads, width, _ = tiles.shape
        scores = F.embedding_bag(
            self.index[: number * heads * width],
            tiles.view(-1, self.tile),
            self.offsets[: number * heads],
            mode="sum",
            per_sample_weights=query.expand(number, heads, width).reshape(-1),
        )
        return scores.view(number, heads, -1).transpose(0, 1).flatten(1)[:, :count]


class ValueRows(Rows, SummedValues):
    """Rows summed up with the probabilities as weights, by `embedding_bag`."""

    def __init__(self, dense: Tensor, capacity: int) -> None:
        super().__init__(dense, capacity)
        heads, device = dense.shape[0], dense.device
        index = torch.arange(heads * capacity, dtype=torch.int32, device=device)
        self.index = index.view(heads, capacity)
        self.heads = torch.arange(heads, dtype=torch.int32, device=device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        count = weights.shape[1]
        return F.embedding_bag(
            self.index[:, :count].reshape(-1),
            self.rows.view(-1, self.rows.shape[2]),
            self.heads * count,
            mode="sum",
            per_sample_weights=weights.reshape(-1),
        )


class ValueRowProduct(Rows, SummedValues):
    """Probabilities as a row times the values: what one writes first."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.bmm(weights[:, None], self.rows[:, : weights.shape[1]])[:, 0]


class ValueTiles(Tiles, SummedValues):
    """Each tile times its probabilities as a column, then the sum over tiles."""

    tile = VALUE_TILE

    def weighted_sum(self, weights: Tensor) -> Tensor:
        tiles = self.upto(weights.shape[1])
        number, heads, width, size = tiles.shape
        padded = F.pad(weights, (0, number * size - weights.shape[1]))
        columns = padded.view(heads, number, 1, size).transpose(0, 1).reshape(-1, 1, size).mT
        sums = torch.bmm(tiles.view(-1, width, size), columns)
        return sums.view(number, heads, width).sum(dim=0)


KEYS: tuple[type[Any], ...] = (KeyRows, KeyTiles)
VALUES: tuple[type[Any], ...] = (ValueTiles, ValueRows, ValueRowProduct)


class FullCache:
    """Keys and values of one layer, N = batch * heads."""

    def __init__(
        self, key: Tensor, value: Tensor, capacity: int, layouts: tuple[type[Any], type[Any]]
    ) -> None:
        """key, value: (N, T, D) of the tokens so far; layouts: of keys and of values."""
        self.keys, self.values = layouts[0](key, capacity), layouts[1](value, capacity)
        self.scale = 1 / math.sqrt(key.shape[2])

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: int) -> Tensor:
        """The token at position `at`, all (N, D), attends to itself and all before it."""
        self.keys.write(at, key)
        self.values.write(at, value)
        scores = self.keys.scores(query * self.scale, at + 1)
        return self.values.weighted_sum(torch.softmax(scores, dim=-1))


def fastest_layouts(
    key: Tensor, value: Tensor, synchronize: Any = lambda: None
) -> tuple[type[Any], type[Any]]:
    """The layouts of keys and of values (N, T, D) that are read fastest here, by timing."""
    query = key[:, -1]
    weights = torch.softmax(torch.zeros(value.shape[:2], device=value.device), dim=-1)
    weights = weights.to(value.dtype)
    length = key.shape[1]
    keys = [
        (_seconds(kind, key, lambda held: held.scores(query, length), synchronize), kind)
        for kind in KEYS
    ]
    values = [
        (_seconds(kind, value, lambda held: held.weighted_sum(weights), synchronize), kind)
        for kind in VALUES
    ]
    return min(keys, key=lambda pair: pair[0])[1], min(values, key=lambda pair: pair[0])[1]


def _seconds(kind: type[Any], dense: Tensor, read: Any, synchronize: Any) -> float:
    """The least wall time of a read of tensors that take turns."""
    nbytes = dense.numel() * dense.element_size()
    copies = max(2, min(24, -(-TRIAL_BYTES // nbytes)))
    held = [kind(dense, dense.shape[1]) for _ in range(copies)]
    times = []
    for number in range(TRIALS + copies):
        synchronize()
        began = time.perf_counter()
        read(held[number % copies])
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times[copies:])
