"""The state of Key-Value Means: compressed rows and the exact window in front of them."""

import dataclasses

import torch
from torch import Tensor

from meanbank.core.state import State
from meanbank.ops.windowed import WindowedMemory


@dataclasses.dataclass(frozen=True)
class KVMRows(State):
    """Compressed memory rows, in fp32 or better.

    key: (B, Hkv, M, Dk) sums of stored keys: position-free and normalised, unless set otherwise.
    value: (B, Hkv, M, Dv) sums of values.
    scale: (B, Hkv, M) what brings a value sum back to scale: the radius (norm of the value that
        opened the row), or, without a value radius, the number of writes.
    """

    part = "rows"

    key: Tensor
    value: Tensor
    scale: Tensor

    @property
    def count(self) -> int:
        return self.key.shape[2]


@dataclasses.dataclass(frozen=True)
class KVMMemory(WindowedMemory):
    """Everything `kvm_attention` needs in order to go on after `seen` tokens.

    rows: the compressed memory; None until the first chunk has left the window.
    window_key: (B, Hkv, L, Dk) exact keys (after rotary positions) of the last L tokens.
    window_value: (B, Hkv, L, Dv); None when the caller stores values in a form of its own and
        puts them back before the next call.
    window_gate: (B, Hkv, L) merge gates of the same tokens, in fp32 or better; None without a gate.
    seen: tokens seen so far.

    The update is lazy: at rest on a chunk boundary the window still holds the oldest block, which
    is only swallowed when a further token arrives.
    """

    rows: KVMRows | None
    window_key: Tensor
    window_value: Tensor | None
    window_gate: Tensor | None
    seen: int


@dataclasses.dataclass(frozen=True)
class KVMUpdate:
    """A record of one memory update, for inspection and tests.

    start: position of the first of the C tokens that overflowed.
    appended: (B, Hkv, n) their indices 0..C-1 that got rows of their own, ascending.
    novelty: (B, Hkv, C) largest similarity to any earlier row; by default the lowest are appended.
    route: (B, Hkv, C) the row that each token was merged into; -1 where it was appended.
    rows: the rows after the update.
    """

    start: int
    appended: Tensor
    novelty: Tensor | None
    route: Tensor | None
    rows: KVMRows

    @property
    def opened(self) -> Tensor:
        """Which of the C tokens got rows of their own: (B, Hkv, C) booleans."""
        size = self.appended.shape[2] if self.route is None else self.route.shape[2]
        shape = (*self.appended.shape[:2], size)
        none = torch.zeros(shape, dtype=torch.bool, device=self.appended.device)
        return none.scatter(2, self.appended, True)

    @property
    def destination(self) -> Tensor:
        """The row that each of the C tokens went into, its own or another's: (B, Hkv, C)."""
        first = self.rows.count - self.appended.shape[2]
        own = torch.arange(first, self.rows.count, device=self.appended.device)
        if self.route is None:
            return own.expand_as(self.appended)
        return self.route.scatter(2, self.appended, own.expand_as(self.appended))
