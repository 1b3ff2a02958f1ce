"""Full attention: every token is kept."""

import dataclasses

import torch
from torch import Tensor

from meanbank.core.bags import by_bags
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.room import appended
from meanbank.core.values import joined
from meanbank.memory.base import Memory, MemoryConfig, MemoryState, Usage
from meanbank.ops.attention import attention_of_one, full_attention

ROOM = 256  # tokens for which there is room at most, once one has been decoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(MemoryConfig, tag="full"):
    """Causal softmax attention over all tokens."""

    def build(self, geometry: Geometry) -> "FullMemory":
        return FullMemory(geometry)


@dataclasses.dataclass(frozen=True)
class FullState(MemoryState):
    """key (B, Hkv, S, Dk) and what the value source stores, of all S tokens."""

    part = "exact tokens"

    key: Tensor
    values: Tensor

    def usage(self) -> Usage:
        return Usage(exact=self.key.shape[2])

    @property
    def undoable(self) -> int:
        return self.key.shape[2]

    def crop(self, tokens: int) -> "FullState":
        self.check_crop(tokens)
        left = self.undoable - tokens
        return FullState(self.key[:, :, :left].clone(), joined([self.values], left))


class FullMemory(Memory):
    def forward(self, query, key, values, gate_input, state, span):
        if state is not None and span.length == 1 and not torch.is_grad_enabled():
            held = state.key.to(key.dtype)
            key = appended(held, key, 2, ROOM, channels_first=by_bags(key))
            stored = values.appended_to(state.values, ROOM)
            output = attention_of_one(query, key, values.standing_for(stored))
            return output, FullState(key, stored)
        if state is not None:
            key = torch.cat([state.key.to(key.dtype), key], dim=2)
            values = values.after(state.values)
        output = full_attention(query, key, values.dense().to(query.dtype))
        return output, FullState(key, values.stored())

    def rows_max(self, tokens: int) -> int:
        return tokens

    def flops(self, tokens: int) -> Flops:
        return self.read_flops(tokens * (tokens + 1) // 2)

    def held_after(self, tokens: int) -> Usage:
        return Usage(exact=tokens)

    def held_max(self, tokens: int, undo: int = 0) -> Usage:
        return Usage(exact=tokens)

    def state_like(self, tokens, batch, dtype, stored):
        key = self.empty(batch, tokens, self.geometry.key_dim, dtype)
        return FullState(key, stored(tokens))
