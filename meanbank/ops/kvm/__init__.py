"""Key-Value Means attention: a readable reference and a fast equal."""

from meanbank.ops.kvm.api import kvm_attention
from meanbank.ops.kvm.memory import KVMMemory, KVMRows, KVMUpdate

__all__ = ["KVMMemory", "KVMRows", "KVMUpdate", "kvm_attention"]
