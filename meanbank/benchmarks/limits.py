"""The least work of an operator, counted from shapes: what its limit is made of.

FLOPs are those of the matrix products on the (query, row) pairs that the memory shows; backward
two for each of them, without what a backend computes again. Bytes are what has to be read (and, in
a whole pass, written) once. A backend that needs less than the specification can pass its limit.
"""

import dataclasses

import torch

from meanbank.benchmarks.settings import Sizes
from meanbank.memory import Full
from meanbank.memory.kvm import KeyValueMeans

PHASES = ("prefill", "backward", "decode")


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one pass, or of one generated token."""

    flops: float
    nbytes: float


def work(phase: str, sizes: Sizes, budget: str | None, length: int, dtype: torch.dtype) -> Work:
    """Work of a phase on `length` tokens; of full attention where the budget is None.

    decode: the mean of the tokens length + 1 to length + chunk_size, one at a time, what KVM
    writes included.
    """
    config = Full() if budget is None else sizes.memory(budget)
    memory = config.build(sizes.geometry)
    row = 2 * sizes.heads * sizes.head_dim * dtype.itemsize  # a key and a value
    if phase == "decode":
        stop = length + sizes.chunk_size
        flops = memory.flops(stop).forward - memory.flops(length).forward
        rows = sum(rows_read(memory, tokens) for tokens in range(length + 1, stop + 1))
        scale = sizes.batch / sizes.chunk_size
        return Work(flops * scale, rows * row * scale)
    flops, passes = memory.flops(length), {"prefill": 2, "backward": 4}[phase]
    counted = flops.forward if phase == "prefill" else flops.backward
    # Forward reads q, k, v and writes the output; backward those and the gradients of all.
    return Work(counted * sizes.batch, length * row * passes * sizes.batch)


def rows_read(memory, tokens: int) -> int:
    """Rows that the last of `tokens` tokens attends to, itself included."""
    if not isinstance(memory, KeyValueMeans):
        return tokens
    held = memory.held_after(tokens)
    return held.exact + held.rows
