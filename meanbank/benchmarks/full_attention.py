"""Full causal attention in plain PyTorch, as fast as we could make it: whole passes.

Query blocks, each against all keys up to its own end, so that later blocks are skipped; scores go
to one buffer that is allocated once, where the softmax works in place. On a CPU head by head: the
scores of one head's block stay in a cache. All arguments are (N, T, D), batch and heads in N.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # queries at a time


def full_forward(query: Tensor, key: Tensor, value: Tensor, block: int = BLOCK) -> Tensor:
    """Outputs (N, T, D), without gradients."""
    output = torch.empty_like(value)
    for heads, start, stop, probabilities in _blocks(query, key, block):
        torch.bmm(probabilities, value[heads, :stop], out=output[heads, start:stop])
    return output


def full_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    gradient: Tensor,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from that of the output; probabilities are made again."""
    scale = 1 / math.sqrt(query.shape[-1])
    precise = torch.promote_types(key.dtype, torch.float32)  # sums over blocks
    query_gradient = torch.empty_like(query)
    key_gradient = torch.zeros_like(key, dtype=precise)
    value_gradient = torch.zeros_like(value, dtype=precise)
    delta = (gradient * output).sum(dim=-1, keepdim=True)
    scratch = _buffer(query, key, block)
    for heads, start, stop, probabilities in _blocks(query, key, block):
        rows = slice(start, stop)
        outer = gradient[heads, rows]
        _accumulate(value_gradient[heads, :stop], probabilities.mT, outer, 1.0)
        scores = scratch[: probabilities.numel()].view_as(probabilities)
        torch.bmm(outer, value[heads, :stop].mT, out=scores)
        scores.sub_(delta[heads, rows]).mul_(probabilities)
        part = query_gradient[heads, rows]
        torch.baddbmm(part, scores, key[heads, :stop], beta=0, alpha=scale, out=part)
        _accumulate(key_gradient[heads, :stop], scores.mT, query[heads, rows], scale)
    return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype)


class FullAttention(torch.autograd.Function):
    """`full_forward` with `full_backward` as its gradient; keeps inputs and outputs only."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = full_forward(query, key, value)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        (gradient,) = gradients
        query, key, value, output = ctx.saved_tensors
        return full_backward(query, key, value, output, gradient)


def full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with gradients; (B, H, T, D) in and out."""
    flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
    output: Any = FullAttention.apply(*flat)
    return output.view_as(value)


def _blocks(query: Tensor, key: Tensor, block: int) -> Iterator[tuple[slice, int, int, Tensor]]:
    """Yield heads, first and last query, and probabilities (heads, queries, keys up to the last).

    The probabilities are valid until the next block.
    """
    count, length, width = query.shape
    block = min(block, length)
    group = _group(query)
    buffer = _buffer(query, key, block)
    hidden = torch.full((block, block), -math.inf, dtype=query.dtype, device=query.device).triu_(1)
    for head in range(0, count, group):
        heads = slice(head, head + group)
        size = min(group, count - head)
        for start in range(0, length, block):
            stop = min(start + block, length)
            scores = buffer[: size * (stop - start) * stop].view(size, stop - start, stop)
            torch.baddbmm(
                scores,
                query[heads, start:stop],
                key[heads, :stop].mT,
                beta=0,
                alpha=1 / math.sqrt(width),
                out=scores,
            )
            scores[:, :, start:].add_(hidden[: stop - start, : stop - start])
            torch.softmax(scores, dim=-1, out=scores)
            yield heads, start, stop, scores


def _group(query: Tensor) -> int:
    """Heads at a time."""
    return 1 if query.device.type == "cpu" else len(query)


def _buffer(query: Tensor, key: Tensor, block: int) -> Tensor:
    """Room for the scores of a block, flat."""
    return query.new_empty(_group(query) * min(block, query.shape[1]) * key.shape[1])


def _accumulate(sums: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """sums += scale * left @ right, in the precision of the sums."""
    if sums.dtype == left.dtype:
        torch.baddbmm(sums, left, right, alpha=scale, out=sums)
    else:
        sums.add_(torch.bmm(left, right), alpha=scale)
