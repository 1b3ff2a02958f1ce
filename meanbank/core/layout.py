"""Layout: where the tokens of one call stand in their sequence."""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """`length` new tokens that follow `seen` earlier ones, alike for every row of the batch.

    Positions come from tokens seen, never from how many rows a memory holds.
    """

    seen: int
    length: int

    @property
    def total(self) -> int:
        """Tokens seen after this call."""
        return self.seen + self.length

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of the new tokens, (T,)."""
        return torch.arange(self.seen, self.total, device=device)
