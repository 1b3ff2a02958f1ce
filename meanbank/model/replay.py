"""How a recurrence forgets: an earlier matrix and what came after it, to be read again.

A matrix that decays cannot be un-multiplied.
"""

import dataclasses

import torch
from torch import Tensor

from meanbank.core.geometry import merge_heads, split_heads
from meanbank.core.layout import Layout
from meanbank.core.record import Record
from meanbank.core.state import State
from meanbank.core.tail import Tail
from meanbank.ops.rwkv7 import rwkv7_recurrence


@dataclasses.dataclass(frozen=True)
class Replay(State):
    """The last tokens of each row, as the recurrence reads them, and its memory before them.

    matrix: (B, H, Dv, Dk) before the tokens held.
    inputs: what `rwkv7_recurrence` takes but the receptance, in its order, heads side by side. The
        zeros before the tokens of a row decay, write and remove nothing.
    """

    matrix: Tensor
    inputs: tuple[Tail, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """The tokens held of each row."""
        return self.inputs[0].depths

    @property
    def undoable(self) -> int:
        return min(self.depths)

    def extended(self, inputs: list[Tensor], layout: Layout) -> "Replay":
        """The same and the tokens that follow, inputs (B, H, T, D) each."""
        tails = (
            layout.extended(merge_heads(x), tail)
            for x, tail in zip(inputs, self.inputs, strict=True)
        )
        begins = torch.tensor(layout.begins, device=self.matrix.device)[:, None, None, None]
        return Replay(self.matrix.masked_fill(begins, 0), tuple(tails))

    @classmethod
    def after(cls, matrix: Tensor, inputs: list[Tensor]) -> "Replay":
        """No tokens after the matrix; inputs (B, H, T, D) say how large theirs are."""
        none = (0,) * len(matrix)
        return cls(matrix, tuple(Tail(merge_heads(x[:, :, :0]), none) for x in inputs))

    def read(self) -> Tensor:
        """The matrix (B, H, Dv, Dk) after the tokens held."""
        return self._read(tuple(tail.tokens for tail in self.inputs))

    def crop(self, tokens: int) -> "Replay":
        self.check_crop(tokens)
        return Replay(self.matrix, tuple(tail.crop(tokens) for tail in self.inputs))

    def limited(self, record: Record) -> "Replay":
        """Reads all but the last `undo` tokens of each row and holds those."""
        if max(self.depths) <= record.undo:
            return self
        held = tuple(min(depth, record.undo) for depth in self.depths)
        width = self.inputs[0].tokens.shape[1]
        back = torch.arange(width, 0, -1, device=self.matrix.device)  # distances from the end
        stays = (back <= torch.tensor(held, device=self.matrix.device)[:, None])[..., None]
        read, rest = width - min(held), width - max(held)
        gone = tuple(tail.tokens.masked_fill(stays, 0)[:, :read] for tail in self.inputs)
        left = (tail.tokens[:, rest:].clone() for tail in self.inputs)
        return Replay(self._read(gone), tuple(Tail(tokens, held) for tokens in left))

    def _read(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if inputs[0].shape[1] == 0:
            return self.matrix
        heads = self.matrix.shape[1]
        log_decay, key, value, removal, rate = (split_heads(x, heads) for x in inputs)
        args = (log_decay, key, value, removal, rate)
        return rwkv7_recurrence(torch.zeros_like(key), *args, state=self.matrix)[1]
