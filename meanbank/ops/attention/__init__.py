"""Exact attention over everything, or over a window."""

from meanbank.ops.attention.full import attention_of_one, full_attention
from meanbank.ops.attention.window import BlockRule, SlidingRule, window_attention

__all__ = ["BlockRule", "SlidingRule", "attention_of_one", "full_attention", "window_attention"]
