"""Token shift: a learned step from each token towards the one before it (KVM paper, section 4)."""

import torch
from torch import Tensor


def token_shift(x: Tensor, mix: Tensor, before: Tensor) -> Tensor:
    """`x_t + mix * (x_{t-1} - x_t)` for every channel.

    x, before: (B, T, W), each token and what stands before it; mix: (W,).
    """
    return torch.lerp(x, before, mix.to(x.dtype))


def shift_start(mix: Tensor, power: float) -> Tensor:
    """Start values of a mix (W,): `1 - (i / W) ** power` for channels i."""
    channels = torch.arange(len(mix), device=mix.device, dtype=torch.float64)
    return (1 - (channels / len(mix)) ** power).to(mix.dtype)
