"""OVQ attention in plain PyTorch: the specification of the operator.

Source: Alonso, Figliolia and Millidge, arXiv 2602.03922, as the baseline of Goldstein et al.,
"Key-Value Means", arXiv 2605.09877. Shapes: B batch, H query heads, Hkv key/value heads,
G = H / Hkv, T tokens, C chunk, M dictionary rows, Dk and Dv head dimensions.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meanbank.core.precision import accumulator_dtype
from meanbank.ops.checks import whole_rows
from meanbank.ops.kvm.common import gather, spans
from meanbank.ops.kvm.reference import add_rows, append, per_head, split
from meanbank.ops.kvm.routing import ascending, first_argmax
from meanbank.ops.ovq.memory import OVQMemory, OVQRows

EPSILON = 1e-5  # added to the norm that divides queries and keys


def ovq_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    temperature: Tensor,
    chunk_size: int,
    budget: Callable[[int], float],
    memory: OVQMemory | None,
    trace: list[Tensor] | None,
) -> tuple[Tensor, OVQMemory]:
    """See `meanbank.ops.ovq.ovq_attention`, which checks the arguments."""
    batch, kv_heads, length, key_dim = key.shape
    key = normalized(key).to(key.dtype)
    scale = per_head(temperature, kv_heads) * math.sqrt(key_dim)
    query = (normalized(query).view(batch, kv_heads, -1, length, key_dim) * scale).to(key.dtype)
    seen, rows = 0, None
    window_key, window_value = key[:, :, :0], value[:, :, :0]
    if memory is not None:
        seen, rows = memory.seen, memory.rows
        if rows is not None:
            rows = rows.map(lambda tensor: tensor.to(accumulator_dtype(key.dtype)))
        assert memory.window_value is not None  # the api has checked
        window_key, window_value = memory.window_key.to(key), memory.window_value.to(value)

    outputs, parts = [], spans(seen, seen + length, chunk_size)
    for (start, _), (block_query,), (block_key, block_value) in zip(
        parts, split((query,), parts, dim=3), split((key, value), parts), strict=True
    ):
        if start and start % chunk_size == 0:  # a token arrives after a whole chunk
            rows = take_in(rows, window_key, window_value, whole_rows(budget(start), start), trace)
            window_key, window_value = key[:, :, :0], value[:, :, :0]
        window_key = append(window_key, block_key)
        window_value = append(window_value, block_value)
        outputs.append(read(block_query, window_key, window_value, rows))
    output = torch.cat(outputs, dim=3).flatten(1, 2)
    return output, OVQMemory(rows, window_key, window_value, seen + length)


def normalized(x: Tensor) -> Tensor:
    """`x / (|x| + 1e-5)` over channels, in fp32 or better."""
    x = x.to(accumulator_dtype(x.dtype))
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + EPSILON)


def read(query: Tensor, key: Tensor, value: Tensor, rows: OVQRows | None) -> Tensor:
    """One softmax over [dictionary; current chunk] for the n last tokens of the chunk.

    A row stands for `count` tokens, so its logit is raised by `log count`. query
    (B, Hkv, G, n, Dk), scaled; key, value (B, Hkv, L, D). Returns (B, Hkv, G, n, Dv).
    """
    length = key.shape[2]
    count = query.shape[3]
    precise = accumulator_dtype(query.dtype)
    hidden = torch.ones(count, length, dtype=torch.bool, device=key.device)
    hidden = hidden.triu_(length - count + 1)
    scores = (query @ key[:, :, None].mT).to(precise).masked_fill(hidden, -math.inf)
    if rows is not None:
        row_scores = (query @ rows.key.to(query.dtype)[:, :, None].mT).to(precise)
        row_scores = row_scores + rows.count.log()[:, :, None, None]
        scores = torch.cat([row_scores, scores], dim=-1)
        value = torch.cat([rows.value.to(value.dtype), value], dim=2)
    return scores.softmax(dim=-1).to(value.dtype) @ value[:, :, None]


def take_in(
    rows: OVQRows | None,
    key: Tensor,
    value: Tensor,
    wanted: int,
    trace: list[Tensor] | None = None,
) -> OVQRows:
    """The dictionary after a chunk: key (B, Hkv, C, Dk), normalised, and value (B, Hkv, C, Dv).

    It grows to `wanted` rows by the tokens least similar to all earlier rows, the least similar
    first; the others move the mean of their most similar earlier row. Of an empty dictionary the
    first token becomes the one earlier row.
    """
    precise = accumulator_dtype(key.dtype)
    key, value = key.to(precise), value.to(precise)
    first = torch.zeros(*key.shape[:2], 0 if rows else 1, dtype=torch.long, device=key.device)
    if rows is None:
        rows = OVQRows(key[:, :, :1], value[:, :, :1], torch.ones_like(key[:, :, :1, 0]))
        key, value = key[:, :, 1:], value[:, :, 1:]
    count = min(max(wanted - rows.size, 0), key.shape[2])
    opened = route = first[:, :, :0]
    if key.shape[2]:
        opened, route = assign(key, rows.key, count)
    if trace is not None:
        own = torch.arange(rows.size, rows.size + count, device=key.device).expand_as(opened)
        trace.append(torch.cat([first, route.scatter(2, opened, own)], dim=2))
    if key.shape[2] == 0:
        return rows
    merged = torch.ones_like(key[..., 0]).scatter(-1, opened, 0.0)  # 0 for tokens with own rows
    new_count = rows.count.scatter_add(-1, route, merged)
    share = (merged / new_count.gather(-1, route))[..., None]
    row_key = add_rows(rows.key, route, share * (key - gather(rows.key, route)))
    row_value = add_rows(rows.value, route, share * (value - gather(rows.value, route)))
    return OVQRows(
        append(row_key, gather(key, opened)),
        append(row_value, gather(value, opened)),
        torch.cat([new_count, torch.ones_like(opened, dtype=precise)], dim=-1),
    )


@torch.no_grad()
def assign(key: Tensor, row_key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` tokens that open rows (B, Hkv, count), and every token's row (B, Hkv, C).

    Similarities no further apart than rounding noise (2 eps times the norms) are ties.
    """
    longest = [torch.linalg.vector_norm(x, dim=-1).amax(dim=-1) for x in (key, row_key)]
    noise = 2 * torch.finfo(key.dtype).eps * (longest[0] * longest[1])[..., None]
    similarity = key @ row_key.mT
    return ascending(similarity.amax(dim=-1), noise)[..., :count], first_argmax(similarity, noise)
