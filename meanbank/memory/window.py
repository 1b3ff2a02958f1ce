"""What the two window memories share: they keep just the tokens that their window still sees."""

import dataclasses
import functools

import torch
from torch import Tensor

from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.state import State, check_tensors
from meanbank.memory.base import Memory
from meanbank.ops.attention.window import WindowRule, key_positions, window_attention


@dataclasses.dataclass(frozen=True)
class WindowState(State):
    """key (B, Hkv, s + L, Dk) and stored values: s sink tokens, then the L last tokens."""

    key: Tensor
    values: Tensor


class WindowMemory(Memory):
    """Attention within a `WindowRule`."""

    def __init__(self, geometry: Geometry, window: WindowRule) -> None:
        super().__init__(geometry)
        self.window = window

    def forward(self, query, key, values, gate_input, state, span):
        if state is not None:
            key = torch.cat([state.key.to(key.dtype), key], dim=2)
            values = values.after(state.values)
        dense = values.dense().to(query.dtype)
        output = window_attention(query, key, dense, self.window, span.seen)
        kept = self._kept(span.seen, span.total, key.device)
        return output, WindowState(key.index_select(2, kept), values.stored(kept))

    def _kept(self, seen: int, total: int, device: torch.device) -> Tensor:
        """Which of the keys at hand (those kept after `seen` tokens, then the new ones) to keep."""
        sink, window = key_positions(self.window, total)
        old_sink, old_window = key_positions(self.window, seen)
        offset = len(old_sink) - old_window.start  # index = position + offset, sink aside
        index = [*sink, *(position + offset for position in window)]
        return torch.tensor(index, dtype=torch.long, device=device)

    def check_state(self, state, batch, seen, stored):
        kept = sum(len(part) for part in key_positions(self.window, seen))
        key = (batch, self.geometry.num_kv_heads, kept, self.geometry.key_dim)
        check_tensors(state, WindowState, key=key, values=stored(kept))

    def rows_max(self, tokens: int) -> int:
        return min(tokens, self.window.span + self.window.sink)

    def flops(self, tokens: int) -> Flops:
        return self.read_flops(visible_pairs(self.window, tokens))

    def nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, value_nbytes: int) -> int:
        kept = min(tokens, self.window.span - 1 + self.window.sink)
        return batch * kept * (self.key_nbytes(dtype) + value_nbytes)


@functools.lru_cache
def visible_pairs(window: WindowRule, tokens: int) -> int:
    """(query, key) pairs within `tokens` tokens: each query sees the sink and its window."""
    earliest = map(window.earliest, range(tokens))
    return sum(min(window.sink, low) + at - low + 1 for at, low in enumerate(earliest))
