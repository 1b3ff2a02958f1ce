"""Partial rotary positions: interleaved pairs, frequencies with both end points included."""

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def _frequencies(rotary_dim: int, theta: float) -> Tensor:
    pairs = rotary_dim // 2
    exponents = torch.linspace(0, 1, pairs, dtype=torch.float64)
    return theta**-exponents


def rotary_angles(positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """Angles in radians, (T, rotary_dim / 2), fp64: long positions lose them in anything less."""
    frequencies = _frequencies(rotary_dim, float(theta)).to(positions.device)
    return positions.to(torch.float64)[:, None] * frequencies


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first channels of x (..., T, D) by angles (T, rotary_dim / 2).

    `y0 = x0 cos + x1 sin`, `y1 = x1 cos - x0 sin` for each interleaved pair.
    """
    if angles.shape[-1] == 0:
        return x
    rotary_dim = 2 * angles.shape[-1]
    precise = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(precise), angles.sin().to(precise)
    even, odd = x[..., :rotary_dim].to(precise).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)
