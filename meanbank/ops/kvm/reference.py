"""Key-Value Means attention in plain PyTorch: the specification of the operator.

Source: Goldstein et al., "Key-Value Means", arXiv 2605.09877, section 3; every other backend has to
equal this file in outputs and gradients. Shapes: B batch, H query heads, Hkv key/value heads,
G = H / Hkv, T tokens, C chunk, M memory rows, Dk and Dv head dimensions.
"""

import math

import torch
from torch import Tensor

from meanbank.core.precision import accumulator_dtype
from meanbank.ops.kvm.common import (
    Block,
    KVMWeights,
    gather,
    join,
    position_free,
    readout,
    resumed,
    rounding_noise,
    spans,
)
from meanbank.ops.kvm.memory import KVMMemory, KVMRows, KVMUpdate
from meanbank.ops.kvm.options import KVMOptions, Part, Write
from meanbank.ops.kvm.routing import first_argmax, selection


def kvm_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merge_gate: Tensor | None,
    weights: KVMWeights,
    options: KVMOptions,
    memory: KVMMemory | None,
    trace: list[KVMUpdate] | None,
) -> tuple[Tensor, KVMMemory]:
    """See `meanbank.ops.kvm_attention`, which checks the arguments."""
    batch, kv_heads, length, key_dim = key.shape
    chunk = options.chunk_size
    seen, rows = 0, None
    window: list[Block] = []  # the exact window, cut at chunk boundaries
    if memory is not None:
        seen, rows, held = resumed(memory, key, value, merge_gate)
        window = split(held, spans(seen - memory.window_length, seen, chunk))
    query = query.view(batch, kv_heads, -1, length, key_dim) / math.sqrt(key_dim)
    window_query = query * per_head(weights.window_temperature, kv_heads).to(query.dtype)
    state_query = query * per_head(weights.state_temperature, kv_heads).to(query.dtype)

    outputs, new = [], spans(seen, seen + length, chunk)
    queries = split((window_query, state_query), new, dim=3)
    for (start, _), (near, far), block in zip(
        new, queries, split((key, value, merge_gate), new), strict=True
    ):
        if start % chunk:  # go on with the block at hand
            window[-1] = join([window[-1], block])
        else:
            if len(window) == options.window_chunks:  # a token arrives: the oldest block overflows
                rows = overflow(rows, *window.pop(0), weights, options, start, trace)
            window.append(block)
        exact_key, exact_value, _ = join(window)
        outputs.append(read(near, far, exact_key, exact_value, rows, weights, options))

    output = torch.cat(outputs, dim=3).flatten(1, 2)
    return output, KVMMemory(rows, *join(window), seen + length)


def split(tensors: tuple, parts: list[tuple[int, int]], dim: int = 2) -> list:
    """Cut each tensor (or None) along `dim` into consecutive parts of those lengths."""
    lengths = [stop - start for start, stop in parts]
    pieces = [[None] * len(parts) if x is None else x.split(lengths, dim) for x in tensors]
    return list(zip(*pieces, strict=True))


def per_head(temperature: Tensor, kv_heads: int) -> Tensor:
    """(H,) -> (Hkv, G, 1, 1), to scale queries (which equals scaling the keys)."""
    return temperature.view(kv_heads, -1, 1, 1)


def read(
    window_query: Tensor,
    state_query: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    rows: KVMRows | None,
    weights: KVMWeights,
    options: KVMOptions,
) -> Tensor:
    """One softmax over [memory rows; exact window] for the n last tokens of the window.

    window_query, state_query: (B, Hkv, G, n, Dk), scaled, times their temperatures;
    window_key, window_value: (B, Hkv, L, D). Returns (B, Hkv, G, n, Dv).
    """
    count, length = window_query.shape[3], window_key.shape[2]
    scores = window_query @ window_key[:, :, None].mT
    hidden = torch.ones(count, length, dtype=torch.bool, device=scores.device).triu_(
        length - count + 1
    )
    scores = scores.masked_fill(hidden, -math.inf)
    values = window_value
    if rows is not None:
        memory_key = read_key(rows, scores.dtype, weights, options)
        far = state_query.to(memory_key.dtype) @ memory_key[:, :, None].mT
        scores = torch.cat([far, scores], dim=-1)
        values = torch.cat(
            [readout(rows.value, rows.scale, options).to(values.dtype), values], dim=2
        )
    probabilities = torch.softmax(scores, dim=-1, dtype=accumulator_dtype(scores.dtype))
    return probabilities.to(values.dtype) @ values[:, :, None]


def read_key(rows: KVMRows, dtype: torch.dtype, weights: KVMWeights, options: KVMOptions) -> Tensor:
    """The keys (B, Hkv, M, Dk) that queries of `dtype` meet: LN_s of the rows, or their sums."""
    if options.read_key == "raw":
        return rows.key  # never in half precision: a sum grows with its writes
    return weights.norm(rows.key).to(dtype)


def overflow(
    rows: KVMRows | None,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    weights: KVMWeights,
    options: KVMOptions,
    seen: int,
    trace: list[KVMUpdate] | None,
) -> KVMRows:
    """Take the C oldest tokens of the window into the memory when `seen` tokens were seen.

    key (B, Hkv, C, Dk) after rotary positions, value (B, Hkv, C, Dv), gate (B, Hkv, C).
    """
    precise = accumulator_dtype(key.dtype)
    key = stored_key(key.to(precise), weights, options)
    value = value.to(precise)
    start = seen - options.window_chunks * options.chunk_size
    if rows is None:  # the first chunk's tokens are the first rows, whatever the budget says
        rows = open_rows("initial", key, value, gate, options)
        rows = rows.map(torch.clone)  # a view would hold on to every value at hand
        everything = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
        record(trace, KVMUpdate(start, everything, None, None, rows))
        return rows

    count = options.rows_to_append(seen, rows.count)
    similarity, noise = similarities(key, rows.key, weights)
    novelty = similarity.amax(dim=-1)
    appended = selection(novelty, noise, gate, start, count, options)
    if count:
        new_gate = None if gate is None else gate.gather(-1, appended)
        new = open_rows("append", gather(key, appended), gather(value, appended), new_gate, options)
        extended, new_noise = similarities(key, new.key, weights)
        similarity = torch.cat([similarity, extended], dim=-1)
        noise = torch.maximum(noise, new_noise)
        rows = KVMRows(*map(append, rows.tensors(), new.tensors()))
    route = first_argmax(similarity[..., options.sink :], noise) + options.sink
    merged = torch.ones_like(novelty).scatter(-1, appended, 0.0)  # 0 for tokens with own rows
    rows = KVMRows(
        add_rows(rows.key, route, gated(key, gate, "merge", "key", options) * merged[..., None]),
        add_rows(
            rows.value, route, gated(value, gate, "merge", "value", options) * merged[..., None]
        ),
        count_writes(rows.scale, route, merged, options),
    )
    record(trace, KVMUpdate(start, appended, novelty, route.masked_fill(merged == 0, -1), rows))
    return rows


def stored_key(key: Tensor, weights: KVMWeights, options: KVMOptions) -> Tensor:
    """Keys (B, Hkv, C, Dk) as they enter the memory: without their rotary channels, then LN_s.

    The affine LN_s comes after the zeroing and adds to the zeros; "zeroed_again" removes that.
    """
    if options.stored_rotary == "kept":
        return weights.norm(key)
    key = weights.norm(position_free(key, options.rotary_dim))
    if options.stored_rotary == "zeroed_again":
        key = position_free(key, options.rotary_dim)
    return key


@torch.no_grad()
def similarities(key: Tensor, row_key: Tensor, weights: KVMWeights) -> tuple[Tensor, Tensor]:
    """How alike tokens (B, Hkv, C, Dk) and rows (B, Hkv, M, Dk) are: (B, Hkv, C, M).

    Also the rounding noise of these numbers, (B, Hkv, 1): equal tokens and equal rows are common
    (a first-layer key depends on two tokens only), and where they stand in a product decides
    their last bits. Differences within the noise are ties.
    """
    row_key = weights.norm(row_key)
    lengths = (torch.linalg.vector_norm(x, dim=-1) for x in (key, row_key))
    return key @ row_key.mT, rounding_noise(*lengths)


def open_rows(
    write: Write, key: Tensor, value: Tensor, gate: Tensor | None, options: KVMOptions
) -> KVMRows:
    """Rows of their own for n tokens: key (B, Hkv, n, Dk), value (B, Hkv, n, Dv)."""
    gated_value = gated(value, gate, write, "value", options)
    if options.value_scale == "radius":
        # the gate never scales the radius of initial rows
        scale = torch.linalg.vector_norm(value if write == "initial" else gated_value, dim=-1)
    else:
        scale = torch.ones_like(value[..., 0])
    return KVMRows(gated(key, gate, write, "key", options), gated_value, scale)


def gated(x: Tensor, gate: Tensor | None, write: Write, part: Part, options: KVMOptions) -> Tensor:
    """x (B, Hkv, n, D) times the gate (B, Hkv, n), where this part of this write is gated."""
    if gate is None or not options.gates(write, part):
        return x
    return x * gate.to(x.dtype)[..., None]


def count_writes(scale: Tensor, route: Tensor, merged: Tensor, options: KVMOptions) -> Tensor:
    """The radius never changes; counts grow with each write, or (the paper's code) by 1 in every
    row with each chunk of which something is merged."""
    if options.value_scale == "count":
        return scale.scatter_add(2, route, merged)
    if options.value_scale == "chunk_count":
        return scale + merged.amax(dim=-1, keepdim=True)
    return scale


def add_rows(rows: Tensor, route: Tensor, update: Tensor) -> Tensor:
    """rows (B, Hkv, M, D) plus update (B, Hkv, C, D) added to the rows route (B, Hkv, C)."""
    batch, heads, count, _ = rows.shape
    offset = torch.arange(batch * heads, device=rows.device).view(batch, heads, 1) * count
    flat = rows.flatten(0, 2).index_add(0, (route + offset).flatten(), update.flatten(0, 2))
    return flat.view_as(rows)


def append(rows: Tensor, new: Tensor) -> Tensor:
    return torch.cat([rows, new], dim=2)


def record(trace: list[KVMUpdate] | None, update: KVMUpdate) -> None:
    if trace is not None:
        trace.append(update)
