"""Operators: pure functions on tensors."""

from meanbank.ops.attention import full_attention, window_attention
from meanbank.ops.kvm import KVMMemory, KVMRows, KVMUpdate, kvm_attention

__all__ = [
    "KVMMemory",
    "KVMRows",
    "KVMUpdate",
    "full_attention",
    "kvm_attention",
    "window_attention",
]
