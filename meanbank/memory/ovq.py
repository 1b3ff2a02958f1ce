"""OVQ as a memory: the current chunk exactly, and a dictionary of means for everything older."""

import dataclasses
import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.precision import accumulator_dtype
from meanbank.core.state import check_at_least
from meanbank.memory.base import MemoryConfig
from meanbank.memory.budgets import Budget, Saturating
from meanbank.memory.operator import UPDATES_TO_CATCH_UP, OperatorMemory, marked
from meanbank.ops.attention import BlockRule
from meanbank.ops.ovq import OVQMemory, OVQRows, ovq_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class OVQ(MemoryConfig, tag="ovq"):
    """Online vector quantisation (arXiv 2602.03922), as the KVM paper compares it.

    Queries and keys are divided by their norms, so its layers have neither rotary positions nor a
    norm a head unless their address says so.

    budget: rows of the dictionary against tokens seen; chunk_size: tokens seen exactly, and taken
        into the dictionary at a time.
    """

    budget: Budget = Saturating()
    chunk_size: int = 256

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, got {self.chunk_size}")

    def rows_wanted(self, seen: int) -> int:
        return math.floor(self.budget(max(0, seen - 1) // self.chunk_size * self.chunk_size))

    @property
    def size_setting(self) -> str | None:
        name = self.budget.size_setting
        return None if name is None else f"budget.{name}"

    @property
    def first_rows(self) -> int:
        return 1

    def conventions(self, backbone: Conventions) -> Conventions:
        return dataclasses.replace(backbone, rotary_fraction=0.0, qk_norm="none")

    def build(self, geometry: Geometry) -> "OVQAttention":
        return OVQAttention(self, geometry)


class OVQAttention(OperatorMemory):
    """Parameter: one temperature a query head."""

    def __init__(self, config: OVQ, geometry: Geometry) -> None:
        super().__init__(geometry, BlockRule(config.chunk_size, 1))
        self.config = config
        self.temperature = nn.Parameter(torch.ones(geometry.num_heads))

    def initialize(self) -> None:
        init.ones_(self.temperature)

    def attend(self, query, key, value, gate, memory, destinations):
        trace: list[Tensor] | None = None if destinations is None else []
        attended = ovq_attention(
            query,
            key,
            value,
            self.temperature,
            chunk_size=self.config.chunk_size,
            budget=self.config.budget,
            memory=memory,
            return_memory=True,
            trace=trace,
        )
        if destinations is not None:
            destinations += _marked(trace or [], memory.num_rows if memory else 0)
        return cast(tuple[Tensor, OVQMemory], attended)

    def routing(self, memory):
        token = memory.window_key.to(accumulator_dtype(memory.window_key.dtype))
        return token, token, token[:, :, :0] if memory.rows is None else memory.rows.key

    @property
    def exact_tokens(self) -> int:
        return self.config.chunk_size

    def older_rows_max(self, tokens: int) -> int:
        swallowed = (tokens - 1) // self.config.chunk_size * self.config.chunk_size
        if swallowed <= 0:
            return 0
        return max(1, min(math.floor(self.config.budget(swallowed)), swallowed))

    def rows_after(self, tokens: int) -> int:
        chunk = self.config.chunk_size
        last = (tokens - 1) // chunk * chunk
        start = max(chunk, last - UPDATES_TO_CATCH_UP * chunk)
        rows = self.older_rows_max(min(tokens, start + 1))
        for seen in range(start + chunk, last + 1, chunk):
            rows += min(max(math.floor(self.config.budget(seen)) - rows, 0), chunk)
        return rows

    def check_state(self, state, batch, seen, stored):
        super().check_state(state, batch, seen, stored)
        if (rows := state.memory.rows) is not None:
            check_at_least("count", rows.count, 1)

    def memory_like(self, rows, window_key, seen):
        return OVQMemory(rows and OVQRows(*rows), window_key, None, seen)

    def schedule(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """Tokens seen, rows before and rows after, for each update within the first tokens."""
        chunk, rows = self.config.chunk_size, 0
        for seen in range(chunk, tokens, chunk):
            wanted, before = math.floor(self.config.budget(seen)), max(rows, 1)
            # the first token opens the first row, so the first update has one token less to place
            rows = before + min(max(wanted - before, 0), chunk if rows else chunk - 1)
            yield seen, before, rows

    def flops(self, tokens: int) -> Flops:
        """Reads of [dictionary; chunk], and similarities of a chunk's keys with earlier rows."""
        chunk, pairs, similarities = self.config.chunk_size, 0, 0
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            pairs += count * (count + 1) // 2
        for seen, before, rows in self.schedule(tokens):
            pairs += rows * min(chunk, tokens - seen)
            similarities += before * (chunk if seen > chunk else chunk - 1)
        return self.read_flops(pairs) + self.similarity_flops(similarities)


def _marked(blocks: list[Tensor], rows: int) -> Iterator[Tensor]:
    """The rows (B, Hkv, C) of each block's tokens, see `marked`; `rows` were there before.

    A new row is opened by the first token that goes into it, for none is merged into the rows that
    open with it.
    """
    for block in blocks:
        alike = block[..., None] == block[..., None, :]
        first = ~alike.tril(-1).any(dim=-1)
        yield marked(block, first & (block >= rows))
        rows = max(rows, int(block.max()) + 1)
