"""Causal softmax attention over all earlier tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each of the T last tokens attends to itself and everything before it, scale 1 / sqrt(Dk).

    query: (B, H, T, Dk); key: (B, Hkv, S, Dk), S >= T; value: (B, Hkv, S, Dv). Returns
    (B, H, T, Dv).
    """
    length, total = query.shape[2], key.shape[2]
    mask = None
    if 1 < length < total:
        mask = torch.ones(length, total, dtype=torch.bool, device=query.device)
        mask = mask.tril_(total - length)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=1 < length == total,
        enable_gqa=query.shape[1] != key.shape[1],
    )
