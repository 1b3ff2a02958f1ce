"""Maps of low rank, as RWKV-7 and the value residual use them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.flops import Flops, linear_flops


def rounded_rank(value: float) -> int:
    """The nearest multiple of 32, at least 32."""
    return max(32, 32 * round(value / 32))


class LowRank(nn.Module):
    """`base + W2 activation(W1 x)`; the base is left out where it is not wanted."""

    def __init__(self, hidden_size: int, rank: int, width: int, based: bool = True) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.empty(width)) if based else None
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def initialize(self, base: Tensor | None = None) -> None:
        """W1 zero, W2 orthogonal; base: the start values (W,) of the base."""
        if self.base is not None and base is not None:
            init.copy_(self.base, base.to(self.base))
        init.zeros_(self.down.weight)
        init.orthogonal_(self.up.weight, gain=0.1)

    def forward(self, x: Tensor, activation: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        inner = self.down(x)
        mapped = self.up(inner if activation is None else activation(inner))
        return mapped if self.base is None else self.base + mapped

    def flops(self, tokens: int) -> Flops:
        """FLOPs of `tokens` tokens."""
        return linear_flops(self.down, tokens) + linear_flops(self.up, tokens)
