"""The RWKV-7 recurrence: a readable reference and a chunked form that equals it."""

from meanbank.ops.rwkv7.api import rwkv7_recurrence

__all__ = ["rwkv7_recurrence"]
