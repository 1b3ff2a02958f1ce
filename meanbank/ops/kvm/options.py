"""The settings of Key-Value Means attention that are not tensors."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from meanbank.core.config import choose

Write = Literal["initial", "append", "merge"]
Part = Literal["key", "value"]
ValueScale = Literal["radius", "count", "chunk_count"]
Append = Literal["novelty", "random", "recent", "gate"]
ReadKey = Literal["normalized", "raw"]
StoredRotary = Literal["zeroed", "zeroed_again", "kept"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVMOptions:
    """See `meanbank.ops.kvm_attention` for the meaning of each."""

    rotary_dim: int
    budget: Callable[[int], int]
    chunk_size: int = 256
    window_chunks: int = 2
    sink: int = 1
    value_scale: ValueScale = "radius"
    gated_writes: tuple[Write, ...] = ("merge",)
    gated_parts: tuple[Part, ...] = ("key", "value")
    append: Append = "novelty"
    read_key: ReadKey = "normalized"
    stored_rotary: StoredRotary = "zeroed"

    def __post_init__(self) -> None:
        if self.chunk_size < 1 or self.window_chunks < 1:
            raise ValueError(
                f"chunk_size and window_chunks must be positive, got {self.chunk_size} "
                f"and {self.window_chunks}"
            )
        if not 0 <= self.sink < self.chunk_size:
            raise ValueError(
                f"sink must be at least 0 and below chunk_size ({self.chunk_size}), or no row is "
                f"left to merge into; got {self.sink}"
            )
        choose("value_scale", self.value_scale, ("radius", "count", "chunk_count"))
        for write in self.gated_writes:
            choose("gated write", write, ("initial", "append", "merge"))
        for part in self.gated_parts:
            choose("gated part", part, ("key", "value"))
        choose("append", self.append, ("novelty", "random", "recent", "gate"))
        choose("read_key", self.read_key, ("normalized", "raw"))
        choose("stored_rotary", self.stored_rotary, ("zeroed", "zeroed_again", "kept"))

    def gates(self, write: Write, part: Part) -> bool:
        """Whether the gate scales that part of that write."""
        whole = write == "initial"  # the authors gate initial rows in both parts or not at all
        return write in self.gated_writes and (whole or part in self.gated_parts)

    def rows_to_append(self, seen: int, rows: int) -> int:
        """How many tokens of the chunk that overflows after `seen` tokens get rows of their own."""
        available = seen - (self.window_chunks - 1) * self.chunk_size  # have left the window
        return min(max(min(self.budget(seen), available) - rows, 0), self.chunk_size)
