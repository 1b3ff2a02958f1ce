"""FLOPs: floating-point operations of matrix products, forward and backward.

A product of m x k by k x n costs 2 m k n forward, and twice that backward (one product for the
gradient of each factor). What has no gradient costs no backward. Elementwise work, norms, softmax
and look-ups are not counted.
"""

import dataclasses

from torch import nn


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of the forward and of the backward pass."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, number: int) -> "Flops":
        return Flops(self.forward * number, self.backward * number)

    __rmul__ = __mul__


def products(multiplications: int, learns: bool = True) -> Flops:
    """FLOPs of matrix products with so many scalar multiplications (m k n each).

    learns: whether there is a gradient.
    """
    return Flops(2 * multiplications, 4 * multiplications if learns else 0)


def linear_flops(linear: nn.Linear, tokens: int, learns: bool = True) -> Flops:
    """FLOPs of a linear map of `tokens` tokens."""
    return products(tokens * linear.in_features * linear.out_features, learns)
