"""Block sliding window attention with an optional sink: what KVM is without its memory."""

import dataclasses

from meanbank.core.geometry import Geometry
from meanbank.memory.base import MemoryConfig
from meanbank.memory.window import WindowMemory
from meanbank.ops.attention import BlockRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockWindow(MemoryConfig, tag="block_window"):
    """A query sees the last `blocks` aligned blocks of `block_size` tokens and the first `sink`."""

    block_size: int = 256
    blocks: int = 3
    sink: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.blocks < 1 or self.sink < 0:
            raise ValueError(
                "block_size and blocks must be positive and sink not negative, got "
                f"{self.block_size}, {self.blocks} and {self.sink}"
            )

    @property
    def size_setting(self) -> str:
        return "block_size"

    def build(self, geometry: Geometry) -> WindowMemory:
        return WindowMemory(geometry, BlockRule(self.block_size, self.blocks, self.sink))
