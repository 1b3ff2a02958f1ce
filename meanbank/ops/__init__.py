"""Operators: pure functions on tensors."""

from meanbank.ops.attention import full_attention, window_attention
from meanbank.ops.cross_entropy import linear_cross_entropy
from meanbank.ops.kvm import KVMMemory, KVMRows, KVMUpdate, kvm_attention
from meanbank.ops.ovq import OVQMemory, OVQRows, ovq_attention
from meanbank.ops.rwkv7 import rwkv7_recurrence

__all__ = [
    "KVMMemory",
    "KVMRows",
    "KVMUpdate",
    "OVQMemory",
    "OVQRows",
    "full_attention",
    "kvm_attention",
    "linear_cross_entropy",
    "ovq_attention",
    "rwkv7_recurrence",
    "window_attention",
]
