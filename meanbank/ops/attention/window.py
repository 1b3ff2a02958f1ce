"""Causal attention over a window of recent tokens, in blocks: O(T * window) time and memory."""

import dataclasses
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.state import State

QUERY_BLOCK = 256  # queries handled together; keys of a block: this plus the window


class WindowRule(Protocol):
    """Which earlier tokens a query sees."""

    @property
    def sink(self) -> int:
        """First tokens that every later query sees."""
        ...

    @property
    def span(self) -> int:
        """Most tokens a query sees, itself included, sink aside."""
        ...

    def earliest(self, position: int) -> int:
        """First position (sink aside) that the query at `position` sees."""
        ...

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether query positions (T, 1) see key positions (1, S), causality and sink aside."""
        ...


@dataclasses.dataclass(frozen=True)
class SlidingRule(State):
    """A query sees `size` tokens, itself included."""

    size: int
    sink: int = 0

    @property
    def span(self) -> int:
        return self.size

    def earliest(self, position: int) -> int:
        return max(0, position - self.size + 1)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        return key > query - self.size


@dataclasses.dataclass(frozen=True)
class BlockRule(State):
    """A query sees `blocks` aligned blocks of `size` tokens, its own included, and the sink."""

    size: int
    blocks: int
    sink: int = 0

    @property
    def span(self) -> int:
        return self.size * self.blocks

    def earliest(self, position: int) -> int:
        return max(0, (position // self.size - self.blocks + 1) * self.size)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        own = query.div(self.size, rounding_mode="floor")
        return key >= (own - self.blocks + 1) * self.size


def key_positions(window: WindowRule, seen: int) -> list[range]:
    """Positions that the next query may see and that a state therefore keeps: sink, then window."""
    start = window.earliest(seen)
    return [range(min(window.sink, start)), range(start, seen)]


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowRule,
    seen: int = 0,
    since: int | None = None,
) -> Tensor:
    """Attention of T new tokens, which follow `seen` earlier ones, within `window`.

    query: (B, H, T, Dk); key, value: (B, Hkv, S, D): the tokens `key_positions(window, since)`, all
    later ones up to `seen`, and the T new ones. since: at most `seen`, which it is by default; what
    it adds nobody sees. Returns (B, H, T, Dv).
    """
    sink, oldest = key_positions(window, seen if since is None else since)
    offset = len(sink) - oldest.start  # index of a key = its position + offset, sink aside
    outputs = []
    for start in range(seen, seen + query.shape[2], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, seen + query.shape[2])
        low = window.earliest(start)
        head = min(window.sink, low)  # sink tokens stand at the index that is their position
        keys, values = (
            key[:, :, low + offset : stop + offset],
            value[:, :, low + offset : stop + offset],
        )
        positions = torch.arange(low, stop, device=query.device)
        if head:
            keys = torch.cat([key[:, :, :head], keys], dim=2)
            values = torch.cat([value[:, :, :head], values], dim=2)
            positions = torch.cat([torch.arange(head, device=query.device), positions])
        rows, columns = torch.arange(start, stop, device=query.device)[:, None], positions[None]
        mask = (columns <= rows) & (window.visible(rows, columns) | (columns < window.sink))
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, start - seen : stop - seen],
                keys,
                values,
                attn_mask=mask,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2)
