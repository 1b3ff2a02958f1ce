"""Tail: the last tokens of each row, which the next call looks back on."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.record import Record
from meanbank.core.state import State, join


@dataclasses.dataclass(frozen=True)
class Tail(State):
    """The last token of each row and, where calls may be undone, some before it.

    tokens: (B, n, W), right-aligned, zeros before those held.
    depths: for each row, how many of its last tokens can be forgotten.
    """

    part = "last tokens"

    tokens: Tensor
    depths: tuple[int, ...]

    @property
    def last(self) -> Tensor:
        """The last token of each row, (B, 1, W)."""
        return self.tokens[:, -1:]

    @property
    def undoable(self) -> int:
        return min(self.depths)

    def select(self, rows: Tensor) -> "Tail":
        tokens = self.tokens.index_select(0, rows.to(self.tokens.device))
        return Tail(tokens, tuple(self.depths[row] for row in rows.tolist()))

    def repeat(self, times: int) -> "Tail":
        depths = tuple(depth for depth in self.depths for _ in range(times))
        return Tail(self.tokens.repeat_interleave(times, dim=0), depths)

    @classmethod
    def joined(cls, states, seen):
        width = max(state.tokens.shape[1] for state in states)
        tokens = [F.pad(x.tokens, (0, 0, width - x.tokens.shape[1], 0)) for x in states]
        return Tail(join(tokens), sum((state.depths for state in states), ()))

    def crop(self, tokens: int) -> "Tail":
        self.check_crop(tokens)
        kept = self.tokens.shape[1] - tokens
        return Tail(self.tokens[:, :kept].clone(), tuple(depth - tokens for depth in self.depths))

    def limited(self, record: Record) -> "Tail":
        if max(self.depths) <= record.undo:
            return self
        depths = tuple(min(depth, record.undo) for depth in self.depths)
        return Tail(self.tokens[:, -1 - max(depths) :].clone(), depths)


def tail_like(batch: int, width: int, dtype: torch.dtype) -> Tail | None:
    """The last token of `batch` rows without data, on torch's meta device; None for width 0."""
    if not width:
        return None
    return Tail(torch.empty(batch, 1, width, dtype=dtype, device="meta"), (0,) * batch)


def tail_nbytes(width: int, tokens: int, dtype: torch.dtype, undo: int) -> int:
    """Most bytes of a sequence's tail of W = width within the first `tokens` tokens, where `undo`
    of them can be forgotten."""
    return width * min(tokens, 1 + undo) * dtype.itemsize
