"""Weighted sums of rows of a table, which a CPU reads fastest in `embedding_bag`."""

import functools

import torch
from torch import Tensor

_SUM = 0  # the mode of `torch.embedding_bag`


def sums_of_rows(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Sums over n of weights (..., n) times the rows (..., n) of a table (R, W): (..., W).

    rows: int32; weights: in the dtype of the table. Without gradients.
    """
    *shape, count = rows.shape
    # not through torch.nn.functional, whose checks take longer than the sums of a small table
    sums, *_ = torch.embedding_bag(
        _without_gradient(table),
        rows.reshape(-1),
        _starts(rows.numel() // count, count, rows.device),
        False,
        _SUM,
        False,
        _without_gradient(weights).reshape(-1),
    )
    return sums.view(*shape, table.shape[1])


def _without_gradient(tensor: Tensor) -> Tensor:
    """What a gradient would need is made for any parameter otherwise."""
    return tensor.detach() if tensor.requires_grad else tensor


def sums_of_tokens(weights: Tensor, values: Tensor) -> Tensor:
    """weights (N, G, M) of values (N, M, W), whose rows stand one behind the other: (N, G, W).

    They may be the first of more rows that there is room for.
    """
    heads, group, count = weights.shape
    width = values.shape[2]
    slots = count if heads == 1 else values.stride(0) // width
    rows = numbers(heads * slots, values.device).view(heads, 1, slots)[..., :count]
    table = values.as_strided(((heads - 1) * slots + count, width), (width, 1))
    return sums_of_rows(table, rows.expand(-1, group, -1), weights)


def sums_of_channels(query: Tensor, keys: Tensor) -> Tensor:
    """query (N, G, W) on keys (N, M, W), whose channels stand one behind the other: (N, G, M).

    They may be the first of more keys that there is room for.
    """
    heads, count, width = keys.shape
    slots = keys.stride(2)
    rows = numbers(heads * width, keys.device).view(heads, 1, width)
    table = keys.as_strided((heads * width, slots), (slots, 1))
    return sums_of_rows(table, rows.expand(-1, query.shape[1], -1), query)[..., :count]


def products(query: Tensor, keys: Tensor) -> Tensor:
    """query (N, G, W) on keys (N, M, W) in the order of reading that suits them: (N, G, M)."""
    if keys.stride(1) == 1 < keys.stride(2) and by_bags(keys):
        return sums_of_channels(query, keys)
    return torch.bmm(keys, query.mT).mT


def suits(device: torch.device) -> bool:
    """Whether tensors of a device are best read so; those without data stand for a CPU's."""
    return device.type in ("cpu", "meta")


def by_bags(x: Tensor) -> bool:
    """A CPU reads half precision slowly in products, and fast in `embedding_bag`: it adds up rows
    of a table, so keys stand with their channels first."""
    return suits(x.device) and x.itemsize < 4


def numbers(count: int, device: torch.device) -> Tensor:
    """0 to count - 1 as int32, not to be written to."""
    if device.type == "meta":  # made each time, so that a plan's count is the same each time
        return torch.empty(count, dtype=torch.int32, device=device)
    return _numbers((count - 1).bit_length(), device)[:count]


def _starts(bags: int, count: int, device: torch.device) -> Tensor:
    """Where bags of `count` rows begin, as int32, not to be written to."""
    if device.type == "meta":
        return torch.empty(bags, dtype=torch.int32, device=device)
    return _known_starts(bags, count, device)


@functools.lru_cache(maxsize=4096)
def _known_starts(bags: int, count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, bags * count, count, dtype=torch.int32, device=device)


@functools.cache
def _numbers(bits: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(2**bits, dtype=torch.int32, device=device)
