"""Choices of Key-Value Means that are indices: which tokens get rows, and which rows get tokens.

Nothing here has a gradient. Shapes as in the reference: B batch, Hkv key/value heads, C chunk,
M memory rows.
"""

import torch
from torch import Tensor

from meanbank.ops.kvm.options import KVMOptions


def selection(
    novelty: Tensor,
    noise: Tensor,
    gate: Tensor | None,
    start: int,
    count: int,
    options: KVMOptions,
) -> Tensor:
    """Which `count` of C overflowing tokens get rows of their own: (B, Hkv, count), ascending.

    novelty (B, Hkv, C), the largest similarity to any row, and its rounding noise (B, Hkv, 1);
    gate (B, Hkv, C); start is the position of the first of the C tokens.
    """
    batch, heads, size = novelty.shape
    if options.append == "random":
        draws = random_draws(torch.arange(start, start + size, device=novelty.device), heads)
        chosen = draws.argsort(dim=-1)[:, :count].sort(dim=-1).values
        return chosen.expand(batch, heads, count)
    if options.append == "recent":
        chosen = torch.arange(size - count, size, device=novelty.device)
        return chosen.expand(batch, heads, count)
    if options.append == "gate":
        assert gate is not None  # the api has checked
        gate = gate.detach()
        largest = gate.abs().amax(dim=-1, keepdim=True)
        return lowest(-gate, count, 16 * torch.finfo(gate.dtype).eps * largest)
    return lowest(novelty, count, noise)


def random_draws(position: Tensor, heads: int) -> Tensor:
    """A fixed pseudo-random int64 for each head and position (int64, (C,)): (heads, C).

    Counter based: the number depends on position and head alone, so splits, batches, devices and
    precisions draw alike, and there is no generator state. It is what SplitMix64, seeded with
    its own output number `head` from seed 0, gives as output number `position`. Positions of one
    head never draw the same number, because each step is a bijection.
    """
    head = torch.arange(heads, device=position.device)
    seed = splitmix64(torch.zeros_like(head), head)
    return splitmix64(seed[:, None], position)


def splitmix64(seed: Tensor, counter: Tensor) -> Tensor:
    """Output number `counter` (from 0) of the generator with that seed, as int64 that wrap around.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = seed + (counter + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return constant - (1 << 64) if constant >> 63 else constant


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x as unsigned >> bits; on int64 alone the shift would copy the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def lowest(x: Tensor, count: int, noise: Tensor) -> Tensor:
    """Indices of the `count` lowest of x (B, Hkv, C), ascending; of ties the first are taken."""
    return ascending(x, noise)[..., :count].sort(dim=-1).values


def ascending(x: Tensor, noise: Tensor) -> Tensor:
    """Indices that sort x (B, Hkv, C); ties keep their order.

    Ties are sorted neighbours at most `noise` (B, Hkv, 1) apart.
    """
    values, order = x.sort(dim=-1)
    steps = torch.diff(values, dim=-1, prepend=values[..., :1]) > noise
    rank = torch.empty_like(order).scatter_(-1, order, steps.cumsum(dim=-1))
    return rank.sort(dim=-1, stable=True).indices


def first_argmax(x: Tensor, noise: Tensor, block: int = 64) -> Tensor:
    """argmax over the last dimension of x (B, Hkv, C, M); of those within `noise` the first.

    With NaN among them it is any index below M. It reads x once: the first block whose largest is
    within noise of the best has the answer.
    """
    size = x.shape[-1]
    block = min(block, size)
    whole = size // block * block
    largest = x[..., :whole].unflatten(-1, (-1, block)).amax(dim=-1)
    if whole < size:
        largest = torch.cat([largest, x[..., whole:].amax(dim=-1, keepdim=True)], dim=-1)
    least = largest.amax(dim=-1, keepdim=True) - noise[..., None]
    # what is before a last block that is not whole is less than `least`
    start = (block * _first(largest >= least)).clamp_max(size - block)
    every_start = x.unfold(-1, block, 1)
    within = every_start.gather(-2, start[..., None].expand(*start.shape, block)).squeeze(-2)
    return (start + _first(within >= least)).squeeze(-1)


def _first(true: Tensor) -> Tensor:
    """Indices (..., 1) of the first that are true among the last dimension (..., M), or M - 1."""
    size = true.shape[-1]
    falling = torch.arange(size, 0, -1, device=true.device, dtype=torch.int32)
    first = size - true.int().mul_(falling).amax(dim=-1, keepdim=True).long()
    return first.clamp_max(size - 1)
