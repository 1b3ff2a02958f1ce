"""Online vector-quantised attention: a readable reference."""

from meanbank.ops.ovq.api import ovq_attention
from meanbank.ops.ovq.memory import OVQMemory, OVQRows

__all__ = ["OVQMemory", "OVQRows", "ovq_attention"]
