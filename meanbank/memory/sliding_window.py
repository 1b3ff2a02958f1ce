"""Sliding window attention: each token sees the last W tokens."""

import dataclasses

from meanbank.core.geometry import Geometry
from meanbank.memory.base import MemoryConfig
from meanbank.memory.window import WindowMemory
from meanbank.ops.attention import SlidingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindow(MemoryConfig, tag="sliding_window"):
    """A query sees `window` tokens, itself included, and the first `sink` tokens."""

    window: int = 256
    sink: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.sink < 0:
            raise ValueError(
                f"window must be positive and sink not negative, got {self.window} and {self.sink}"
            )

    @property
    def size_setting(self) -> str:
        return "window"

    def build(self, geometry: Geometry) -> WindowMemory:
        return WindowMemory(geometry, SlidingRule(self.window, self.sink))
