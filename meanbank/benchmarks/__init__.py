"""Benchmarks: times, peaks and shares of what the machine allows, measured side by side."""

from meanbank.benchmarks.kvm import KVMBenchmark
from meanbank.benchmarks.records import Effort, Record, json_lines, write
from meanbank.benchmarks.settings import (
    BUDGETS,
    DTYPES,
    Machine,
    Sizes,
    parse_lengths,
    parse_names,
)

__all__ = [
    "BUDGETS",
    "DTYPES",
    "Effort",
    "KVMBenchmark",
    "Machine",
    "Record",
    "Sizes",
    "json_lines",
    "parse_lengths",
    "parse_names",
    "write",
]
