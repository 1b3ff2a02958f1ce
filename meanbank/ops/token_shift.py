"""Token shift: a learned step from each token towards the one before it (KVM paper, section 4)."""

import torch
from torch import Tensor


def token_shift(x: Tensor, mix: Tensor, previous: Tensor) -> Tensor:
    """`x_t + mix * (x_{t-1} - x_t)` for every channel.

    x: (B, T, W); mix: (W,); previous: (B, 1, W), what stands before the first token.
    """
    before = torch.cat([previous.to(x.dtype), x[:, :-1]], dim=1)
    return torch.lerp(x, before, mix.to(x.dtype))
