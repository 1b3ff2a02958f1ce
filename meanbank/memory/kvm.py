"""Key-Value Means as a memory: an exact window and compressed rows for everything older."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry
from meanbank.core.precision import accumulator_dtype, without_autocast
from meanbank.core.state import check_at_least
from meanbank.memory.base import MemoryConfig
from meanbank.memory.budgets import Budget, PowerLaw
from meanbank.memory.operator import UPDATES_TO_CATCH_UP, OperatorMemory, marked
from meanbank.memory.window import visible_pairs
from meanbank.ops.attention import BlockRule
from meanbank.ops.kvm import KVMMemory, KVMRows, KVMUpdate, kvm_attention
from meanbank.ops.kvm.api import check_backend
from meanbank.ops.kvm.common import KVMWeights
from meanbank.ops.kvm.options import (
    Append,
    KVMOptions,
    Part,
    ReadKey,
    StoredRotary,
    ValueScale,
    Write,
)
from meanbank.ops.kvm.reference import stored_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVM(MemoryConfig, tag="kvm"):
    """Settings of Key-Value Means; the defaults are the paper's KVM-sqrt16.

    budget: rows of the compressed memory against tokens seen.
    chunk_size, window_chunks: the exact window is the last `window_chunks` blocks of that many
        tokens, which is also how many tokens overflow at a time.
    sink: first rows that nothing is merged into.
    The ablations of the paper (its component study), each one setting:
    temperatures: one learned factor a head for memory and for window keys, or none.
    merge_gate: learned (`1 + ELU(x W_g)`) or none; gated_writes and gated_parts say what it scales
        (initial rows whole, if at all).
    value_scale: "radius", or means by "count" of writes, or "chunk_count" as in the authors' code.
    Controls of ours, which the paper lacks:
    append: the tokens that get rows of their own, at equal rows: by "novelty" as in the paper,
        "random" (fixed by position and head), the most "recent" of the block, or those with the
        largest merge "gate" (which must be learned).
    read_key: queries meet rows "normalized" by LN_s as in the paper, or "raw" sums.
    stored_rotary: rotary channels of stored keys are "zeroed" before LN_s as in the paper,
        "zeroed_again" after it too, or "kept"; only "kept" allows rotary_fraction 1, and
        rotary_fraction 0 zeroes nothing.
    """

    budget: Budget = PowerLaw()
    chunk_size: int = 256
    window_chunks: int = 2
    sink: int = 1
    temperatures: Literal["learned", "none"] = "learned"
    merge_gate: Literal["learned", "none"] = "learned"
    gated_writes: tuple[Write, ...] = ("merge",)
    gated_parts: tuple[Part, ...] = ("key", "value")
    value_scale: ValueScale = "radius"
    append: Append = "novelty"
    read_key: ReadKey = "normalized"
    stored_rotary: StoredRotary = "zeroed"
    backend: str = "auto"

    def __post_init__(self) -> None:
        KVMOptions(rotary_dim=0, **self.operator_settings())
        check_backend(self.backend)
        idle = not self.gated_writes or not (self.gated_parts or "initial" in self.gated_writes)
        if self.merge_gate == "learned" and idle and self.append != "gate":
            raise ValueError(
                "nothing reads the merge gate where gated_writes or gated_parts is empty: set "
                "merge_gate: none"
            )
        if self.append == "gate" and self.merge_gate != "learned":
            raise ValueError(
                "append: gate takes the tokens with the largest merge gate, so it needs "
                f"merge_gate: learned, got {self.merge_gate}"
            )

    def operator_settings(self) -> dict:
        """The settings that `kvm_attention` takes under the same names."""
        names = ("budget", "chunk_size", "window_chunks", "sink", "value_scale")
        names += ("gated_writes", "gated_parts", "append", "read_key", "stored_rotary")
        return {name: getattr(self, name) for name in names}

    def rows_wanted(self, seen: int) -> int:
        return self.budget(max(0, seen - 1) // self.chunk_size * self.chunk_size)

    @property
    def size_setting(self) -> str | None:
        name = self.budget.size_setting
        return None if name is None else f"budget.{name}"

    @property
    def first_rows(self) -> int:
        return self.chunk_size

    def conventions(self, backbone: Conventions) -> Conventions:
        return dataclasses.replace(backbone, rotary_fraction=min(0.5, backbone.rotary_fraction))

    def check(self, geometry: Geometry) -> None:
        if geometry.rotary_dim == geometry.key_dim and self.stored_rotary != "kept":
            raise ValueError(
                "a kvm layer zeroes the rotary channels of stored keys, so some channels must be "
                "left without: set address.rotary_fraction below 1 (0.5 is the default), or "
                "keep them with memory.stored_rotary: kept"
            )

    def build(self, geometry: Geometry) -> "KeyValueMeans":
        self.check(geometry)
        return KeyValueMeans(self, geometry)


class KeyValueMeans(OperatorMemory):
    """Parameters: LN_s, the merge gate's projection and two temperatures a head."""

    def __init__(self, config: KVM, geometry: Geometry) -> None:
        super().__init__(geometry, BlockRule(config.chunk_size, config.window_chunks))
        self.config = config
        self.norm = nn.LayerNorm(geometry.key_dim, eps=1e-5)
        self.gate = None
        if config.merge_gate == "learned":
            self.gate = nn.Linear(geometry.hidden_size, geometry.num_kv_heads, bias=False)
        self.state_temperature = self.window_temperature = None
        if config.temperatures == "learned":
            self.state_temperature = nn.Parameter(torch.ones(geometry.num_heads))
            self.window_temperature = nn.Parameter(torch.ones(geometry.num_heads))

    def attend(self, query, key, value, gate, memory, destinations):
        trace: list[KVMUpdate] | None = None if destinations is None else []
        attended = kvm_attention(
            query,
            key,
            value,
            gate,
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            state_temperature=self.state_temperature,
            window_temperature=self.window_temperature,
            rotary_dim=self.geometry.rotary_dim,
            memory=memory,
            return_memory=True,
            trace=trace,
            backend=self.config.backend,
            **self.config.operator_settings(),
        )
        if destinations is not None:
            destinations += [marked(update.destination, update.opened) for update in trace or ()]
        return cast(tuple[Tensor, KVMMemory], attended)

    def routing(self, memory):
        """As `kvm_attention` routes; a gate that scales a row's key is lost in its norm."""
        options = KVMOptions(rotary_dim=self.geometry.rotary_dim, **self.config.operator_settings())
        weights = KVMWeights(self.norm.weight, self.norm.bias, *[self.norm.weight[:0]] * 2)
        key = memory.window_key.to(accumulator_dtype(memory.window_key.dtype))
        token = stored_key(key, weights, options)
        rows = token[:, :, :0] if memory.rows is None else memory.rows.key
        return token, weights.norm(token), weights.norm(rows)

    def initialize(self) -> None:
        for temperature in (self.state_temperature, self.window_temperature):
            if temperature is not None:
                init.ones_(temperature)

    def gates(self, x: Tensor) -> Tensor | None:
        """Merge gates `1 + ELU(x W_g)` in fp32 or better: (B, T, hidden_size) -> (B, Hkv, T)."""
        if self.gate is None:
            return None
        precise = accumulator_dtype(x.dtype)
        with without_autocast(x.device):
            return 1 + F.elu(F.linear(x.to(precise), self.gate.weight.to(precise))).mT

    @property
    def exact_tokens(self) -> int:
        return self.config.window_chunks * self.config.chunk_size

    def older_rows_max(self, tokens: int) -> int:
        chunk, window = self.config.chunk_size, self.config.window_chunks * self.config.chunk_size
        last = (tokens - 1) // chunk * chunk  # an update needs a token after the chunk
        if last < window:
            return 0
        available = last - window + chunk
        return max(chunk, min(self.config.budget(last), available))

    def rows_after(self, tokens: int) -> int:
        chunk, window = self.config.chunk_size, self.config.window_chunks * self.config.chunk_size
        last = (tokens - 1) // chunk * chunk
        start = max(window, last - UPDATES_TO_CATCH_UP * chunk)
        rows = self.older_rows_max(min(tokens, start + 1))
        for seen in range(start + chunk, last + 1, chunk):
            wanted = min(self.config.budget(seen), seen - window + chunk)
            rows += min(max(wanted - rows, 0), chunk)
        return rows

    def check_state(self, state, batch, seen, stored):
        super().check_state(state, batch, seen, stored)
        if (rows := state.memory.rows) is not None:
            check_at_least("scale", rows.scale, 0 if self.config.value_scale == "radius" else 1)

    def memory_like(self, rows, window_key, seen):
        gate = None
        if self.gate is not None:
            gate = window_key.new_empty(
                window_key.shape[:3], dtype=accumulator_dtype(window_key.dtype)
            )
        return KVMMemory(rows and KVMRows(*rows), window_key, None, gate, seen)

    def schedule(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Tokens seen and rows afterwards, for each update within the first `tokens` tokens."""
        chunk, window = self.config.chunk_size, self.config.window_chunks * self.config.chunk_size
        rows = chunk  # the first update takes a whole chunk, whatever the budget says
        for seen in range(window, tokens, chunk):
            if seen > window:
                wanted = min(self.config.budget(seen), seen - window + chunk)
                rows += min(max(wanted - rows, 0), chunk)
            yield seen, rows

    def flops(self, tokens: int) -> Flops:
        """Reads of [memory; window], similarities of written keys with all rows, and the gate.

        Keys count whole: what a backend saves where it compresses them is not taken off.
        """
        chunk, window = self.config.chunk_size, self.config.window_chunks * self.config.chunk_size
        pairs = visible_pairs(self.window, tokens)
        similarities = 0
        for seen, rows in self.schedule(tokens):
            pairs += rows * min(chunk, tokens - seen)
            similarities += chunk * rows if seen > window else 0  # the first chunk is just copied
        flops = self.read_flops(pairs) + self.similarity_flops(similarities)
        if self.gate is None:
            return flops
        learns = bool(self.config.gated_writes and self.config.gated_parts)
        return flops + linear_flops(self.gate, tokens, learns)

    def token_nbytes(self, dtype: torch.dtype) -> int:
        gates = 0 if self.gate is None else self.geometry.num_kv_heads
        return super().token_nbytes(dtype) + gates * accumulator_dtype(dtype).itemsize
