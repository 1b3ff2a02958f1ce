"""Exact attention over everything, or over a window."""

from meanbank.ops.attention.full import full_attention
from meanbank.ops.attention.window import BlockRule, SlidingRule, window_attention

__all__ = ["BlockRule", "SlidingRule", "full_attention", "window_attention"]
