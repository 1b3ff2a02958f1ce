"""What the two window memories share: they keep just the tokens that their window still sees."""

import dataclasses
import functools

import torch
from torch import Tensor

from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.record import Record
from meanbank.core.state import as_index
from meanbank.core.values import joined, selected
from meanbank.memory.base import Memory, MemoryState, Usage
from meanbank.ops.attention import attention_of_one
from meanbank.ops.attention.window import WindowRule, key_positions, window_attention


@dataclasses.dataclass(frozen=True)
class WindowState(MemoryState):
    """Sink tokens, and the last tokens, from where the window of `depth` tokens ago began.

    key (B, Hkv, s + L, Dk) and stored values: s sink tokens, then the L last of `seen` tokens, of
    which the last `depth` can be forgotten.
    """

    part = "exact tokens"

    window: WindowRule
    key: Tensor
    values: Tensor
    seen: int
    depth: int

    def usage(self) -> Usage:
        return Usage(exact=self.key.shape[2])

    @property
    def undoable(self) -> int:
        return self.depth

    def crop(self, tokens: int) -> "WindowState":
        self.check_crop(tokens)
        left = self.key.shape[2] - tokens
        return dataclasses.replace(
            self,
            key=self.key[:, :, :left].clone(),
            values=joined([self.values], left),
            seen=self.seen - tokens,
            depth=self.depth - tokens,
        )

    def limited(self, record: Record) -> "WindowState":
        if self.depth <= record.undo:
            return self
        kept = kept_of(self.window, self.seen - self.depth, self.seen - record.undo, self.seen)
        return dataclasses.replace(
            self,
            key=self.key.index_select(2, kept.to(self.key.device)),
            values=selected(self.values, kept),
            depth=record.undo,
        )


def kept_of(window: WindowRule, held_since: int, since: int, seen: int) -> Tensor:
    """Indices of what a state keeps, among the tokens at hand up to `seen`.

    At hand are `key_positions(window, held_since)` and all later ones, to be kept those from
    `since`, which is not earlier.
    """
    old_sink, old = key_positions(window, held_since)
    sink, recent = key_positions(window, since)
    offset = len(old_sink) - old.start  # index = position + offset, sink aside
    index = [*sink, *(position + offset for position in range(recent.start, seen))]
    return as_index(index)


class WindowMemory(Memory):
    """Attention within a `WindowRule`."""

    def __init__(self, geometry: Geometry, window: WindowRule) -> None:
        super().__init__(geometry)
        self.window = window

    def forward(self, query, key, values, gate_input, state, span):
        held = 0 if state is None else state.depth
        if state is not None:
            key = torch.cat([state.key.to(key.dtype), key], dim=2)
            values = values.after(state.values)
        since = span.seen - held
        if span.length == 1 and not torch.is_grad_enabled():
            visible = key, values
            if held:  # more is at hand than the token sees
                index = kept_of(self.window, since, span.seen, span.total).to(key.device)
                visible = key.index_select(2, index), values.standing_for(values.stored(index))
            output = attention_of_one(query, *visible)
        else:
            dense = values.dense().to(query.dtype)
            output = window_attention(query, key, dense, self.window, span.seen, since)
        depth = min(held + span.length, span.record.undo)
        kept = kept_of(self.window, since, span.total - depth, span.total).to(key.device)
        keys, stored = key.index_select(2, kept), values.stored(kept)
        return output, WindowState(self.window, keys, stored, span.total, depth)

    def rows_max(self, tokens: int) -> int:
        return min(tokens, self.window.span + self.window.sink)

    def flops(self, tokens: int) -> Flops:
        return self.read_flops(visible_pairs(self.window, tokens))

    def held_after(self, tokens: int) -> Usage:
        return Usage(exact=sum(map(len, key_positions(self.window, tokens))))

    def held_max(self, tokens: int, undo: int = 0) -> Usage:
        return Usage(exact=min(tokens, self.window.span - 1 + self.window.sink + undo))

    def state_like(self, tokens, batch, dtype, stored):
        kept = self.held_after(tokens).exact
        key = self.empty(batch, kept, self.geometry.key_dim, dtype)
        return WindowState(self.window, key, stored(kept), tokens, 0)


@functools.lru_cache
def visible_pairs(window: WindowRule, tokens: int) -> int:
    """(query, key) pairs within `tokens` tokens: each query sees the sink and its window."""
    earliest = map(window.earliest, range(tokens))
    return sum(min(window.sink, low) + at - low + 1 for at, low in enumerate(earliest))
