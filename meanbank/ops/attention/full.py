"""Causal softmax attention over all earlier tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core import bags
from meanbank.core.values import Values

QUERY_BLOCK = 256  # queries that share a mask, where there are earlier tokens


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each of the T last tokens attends to itself and everything before it, scale 1 / sqrt(Dk).

    query: (B, H, T, Dk); key: (B, Hkv, S, Dk), S >= T; value: (B, Hkv, S, Dv). Returns
    (B, H, T, Dv). Masks are made for blocks of queries, if at all, and never T x T.
    """
    length, total = query.shape[2], key.shape[2]
    if length in (1, total):
        return _attention(query, key, value, is_causal=length > 1)
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        seen = total - length + stop
        rows = torch.arange(seen - stop + start, seen, device=query.device)
        mask = torch.arange(seen, device=query.device) <= rows[:, None]
        block = query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen]
        outputs.append(_attention(*block, attn_mask=mask))
    return torch.cat(outputs, dim=2)


def attention_of_one(query: Tensor, key: Tensor, values: Values) -> Tensor:
    """The same for T = 1 without gradients, with values however they came about.

    On a CPU keys are read in the order of a product that streams them, or by weighted sums of their
    channels if these come first in memory, and values by weighted sums of their rows, a bank's from
    its table.
    """
    batch, heads, _, width = query.shape
    if not bags.suits(query.device):
        return full_attention(query, key, values.dense().to(query.dtype))
    grouped = (query / math.sqrt(width)).reshape(batch * key.shape[1], -1, width)
    scores = bags.products(grouped, key.flatten(0, 1))
    weights = torch.softmax(scores, dim=-1).reshape(batch, heads, -1)
    return values.weighted_sum(weights)[:, :, None].to(query.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **how)
