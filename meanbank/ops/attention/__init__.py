"""Exact attention over everything, or over a window."""

from meanbank.ops.attention.full import full_attention
from meanbank.ops.attention.window import BlockWindow, SlidingWindow, window_attention

__all__ = ["BlockWindow", "SlidingWindow", "full_attention", "window_attention"]
