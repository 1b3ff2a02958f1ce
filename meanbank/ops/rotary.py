"""Partial rotary positions in the two conventions that the papers use.

"interleaved" (KVM paper): neighbours (0, 1), (2, 3), ... are pairs, and the frequencies run from 1
to 1 / theta with both end points included. "half_split" (nanochat): channel i pairs with i + n of
2 n rotated channels, and the lowest frequency stays above 1 / theta.
"""

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Pairing = Literal["interleaved", "half_split"]


def _frequencies(rotary_dim: int, theta: float, pairing: Pairing) -> Tensor:
    pairs = rotary_dim // 2
    if pairing == "interleaved":
        return theta ** -torch.linspace(0, 1, pairs, dtype=torch.float64, device="cpu")
    return theta ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / max(pairs, 1))


_kept_frequencies = functools.lru_cache(maxsize=64)(_frequencies)


def rotary_angles(
    positions: Tensor, rotary_dim: int, theta: float, pairing: Pairing = "interleaved"
) -> Tensor:
    """Angles in radians, (..., T, rotary_dim / 2), of positions (..., T).

    In fp64: long positions lose them in anything less.
    """
    make = _frequencies if torch.compiler.is_compiling() else _kept_frequencies
    frequencies = make(rotary_dim, float(theta), pairing).to(positions.device)
    return positions.to(torch.float64)[..., None] * frequencies


class Rotation(NamedTuple):
    """Cosines and sines of angles, (..., T, rotary_dim / 2) in fp64: made once, for all that is
    rotated alike."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, angles: Tensor) -> "Rotation":
        return cls(angles.cos(), angles.sin())


def apply_rotary(x: Tensor, rotation: Rotation, pairing: Pairing = "interleaved") -> Tensor:
    """Rotate the first channels of x (..., T, D).

    `y0 = x0 cos + x1 sin`, `y1 = x1 cos - x0 sin` for each pair.
    """
    if rotation.cos.shape[-1] == 0:
        return x
    rotary_dim = 2 * rotation.cos.shape[-1]
    precise = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotation.cos.to(precise), rotation.sin.to(precise)
    rotated, rest = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    rotated = rotated.to(precise)
    if pairing == "interleaved":
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = rotated.chunk(2, dim=-1)
    turned = first * cos + second * sin, second * cos - first * sin
    if pairing == "interleaved":
        joined = torch.stack(turned, dim=-1).flatten(-2)
    else:
        joined = torch.cat(turned, dim=-1)
    joined = joined.to(x.dtype)
    return torch.cat([joined, rest], dim=-1) if rest.shape[-1] else joined
