"""One token that joins the window and changes no row: what is held is read once, and not copied.

Keys, values and gate are appended behind the window (`core.room`); normalised keys and readouts of
the rows are derived once an update (`core.derived`). What decides the speed is the order in which
numbers stand in memory: each of the two reads has one that a CPU streams, by dtype, and the other
ones are up to six times slower. Shapes: N = B Hkv heads of memory, G queries of each.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.bags import by_bags, numbers, products, suits, sums_of_rows, sums_of_tokens
from meanbank.core.derived import derived
from meanbank.core.precision import accumulator_dtype
from meanbank.core.room import appended
from meanbank.ops.kvm.common import KVMWeights, resumed
from meanbank.ops.kvm.fused_keys import CompressedKeys, make_keys
from meanbank.ops.kvm.fused_memory import PreparedRows
from meanbank.ops.kvm.memory import KVMMemory, KVMRows
from meanbank.ops.kvm.options import KVMOptions

TILE = 128  # keys whose scores are summed up side by side


def joins_the_window(
    query: Tensor, key: Tensor, value: Tensor, memory: KVMMemory, options: KVMOptions
) -> bool:
    """Whether a call is one token without gradients that no block leaves the window for."""
    chunk = options.chunk_size
    full = memory.seen % chunk == 0 and memory.seen >= options.window_chunks * chunk
    one_dtype = query.dtype == key.dtype == value.dtype == _read_dtype(key.dtype, options)
    return query.shape[2] == 1 and not full and one_dtype and not torch.is_grad_enabled()


def _read_dtype(dtype: torch.dtype, options: KVMOptions) -> torch.dtype:
    """Raw sums of keys are never read in half precision."""
    return accumulator_dtype(dtype) if options.read_key == "raw" else dtype


def kvm_attention_of_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merge_gate: Tensor | None,
    weights: KVMWeights,
    options: KVMOptions,
    memory: KVMMemory,
) -> tuple[Tensor, KVMMemory]:
    """See `meanbank.ops.kvm_attention`; for calls that `joins_the_window` is true of."""
    seen, rows, (held_key, held_value, held_gate) = resumed(memory, key, value, merge_gate)
    chunk, batch, kv_heads = options.chunk_size, *key.shape[:2]
    key = appended(held_key, key, 2, chunk, channels_first=by_bags(key))
    value = appended(held_value, value, 2, chunk)
    if merge_gate is not None and held_gate is not None:
        merge_gate = appended(held_gate, merge_gate, 2, chunk)
    grouped = batch * kv_heads, query.shape[1] // kv_heads, query.shape[-1]
    # made each time: where there are no temperatures, those at hand are new in each call
    scales = _scales(query, weights.state_temperature, weights.window_temperature)
    far, near = (query * scales).reshape(2, *grouped).unbind()
    scores, parts = [], []
    if rows is not None:
        row_keys, row_values, *maps = derived(
            rows,
            (query.dtype, options.read_key, options.value_scale),
            (weights.norm_weight, weights.norm_bias),
            lambda: _prepared(rows, weights, options, query.dtype),
        )
        for matrix in maps:
            far = far @ matrix
        scores.append(_scores(far.to(query.dtype), row_keys)[..., : rows.count])
        parts.append(row_values)
    scores.append(products(near.to(query.dtype), key.flatten(0, 1)))
    parts.append(value.flatten(0, 1))
    counts = [values.shape[1] for values in parts]
    probabilities = torch.softmax(torch.cat(scores, dim=-1), dim=-1).split(counts, dim=-1)
    output = functools.reduce(torch.add, map(_weighted_sum, probabilities, parts))
    output = output.reshape(*query.shape[:3], value.shape[-1])
    return output, KVMMemory(memory.rows, key, value, merge_gate, seen + 1)


def _scales(query: Tensor, *temperatures: Tensor) -> Tensor:
    """What queries (B, H, 1, Dk) are multiplied by: (n, 1, H, 1, 1) for n kinds of factors (H,)."""
    scales = torch.stack([each.to(accumulator_dtype(query.dtype)) for each in temperatures])
    return (scales / math.sqrt(query.shape[-1]))[:, None, :, None, None]


def _prepared(
    rows: KVMRows, weights: KVMWeights, options: KVMOptions, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """What queries meet of rows, laid out to be streamed: see `_scores` and `_weighted_sum`.

    Where keys are compressed, also the matrix (Dk, P) that maps queries to what meets them.
    """
    key, value, scale = (x.flatten(0, 1) for x in rows.tensors())
    form, key = make_keys(weights.norm_weight, weights.norm_bias, options, dtype, key)
    assert key is not None
    read = PreparedRows.of((key, value, scale), form, options, dtype)
    maps = [form.maps.queries] if isinstance(form, CompressedKeys) else []
    keys, values = read.keys[:, None], read.values
    if by_bags(keys):
        padded = F.pad(keys, (0, 0, 0, -rows.count % TILE))
        keys = padded.unflatten(2, (-1, TILE)).squeeze(1).mT
    if values.device.type == "cpu" and not by_bags(values):  # fastest as matrix times column
        return keys.contiguous(), values.mT.contiguous().mT, *maps
    return keys.contiguous(), values.contiguous(), *maps


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """query (N, G, Dk) on keys: (N, G, count).

    keys: (N, 1, M, Dk) for a product; `by_bags` (N, tiles, Dk, keys a tile).
    """
    if not by_bags(keys):
        return torch.bmm(keys[:, 0], query.mT).mT
    heads, tiles, width, tile = keys.shape
    group = query.shape[1]
    channels = numbers(heads * tiles * width, keys.device).view(heads, 1, tiles, width)
    scores = sums_of_rows(
        keys.view(-1, tile),
        channels.expand(-1, group, -1, -1),
        query[:, :, None].expand(-1, -1, tiles, -1),
    )
    return scores.view(heads, group, tiles * tile)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights (N, G, M) of values (N, M, Dv), read in the order that suits them: (N, G, Dv)."""
    if values.stride(1) == 1 < values.shape[2]:  # channels first
        return torch.bmm(values.mT, weights.mT).mT
    if suits(values.device) and (by_bags(values) or weights.shape[1] == 1):
        return sums_of_tokens(weights, values)
    return torch.bmm(weights, values)
