"""Evaluations: functions from a model and data to plain results."""

from meanbank.evaluation.bigram import bigram_bits_per_byte
from meanbank.evaluation.bpb import bits_per_byte
from meanbank.evaluation.decode_speed import decode_speed
from meanbank.evaluation.memory import memory_at_contexts
from meanbank.evaluation.memory_statistics import MemoryStatistics
from meanbank.evaluation.parts import Parts
from meanbank.evaluation.position_loss import position_loss
from meanbank.evaluation.recall import recall_accuracy

__all__ = [
    "MemoryStatistics",
    "Parts",
    "bigram_bits_per_byte",
    "bits_per_byte",
    "decode_speed",
    "memory_at_contexts",
    "position_loss",
    "recall_accuracy",
]
