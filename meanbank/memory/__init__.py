"""Axis 1: memories. Importing this package registers them all."""

from meanbank.memory.base import Memory, MemoryConfig
from meanbank.memory.block_window import BlockWindow
from meanbank.memory.budgets import Budget, Fixed, PowerLaw, Saturating
from meanbank.memory.full import Full
from meanbank.memory.kvm import KVM
from meanbank.memory.ovq import OVQ
from meanbank.memory.rwkv7 import RWKV7
from meanbank.memory.sliding_window import SlidingWindow

__all__ = [
    "KVM",
    "OVQ",
    "RWKV7",
    "BlockWindow",
    "Budget",
    "Fixed",
    "Full",
    "Memory",
    "MemoryConfig",
    "PowerLaw",
    "Saturating",
    "SlidingWindow",
]
