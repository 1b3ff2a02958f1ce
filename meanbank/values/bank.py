"""Bank of Values: a layer's own table, indexed by token id (arXiv 2606.02780)."""

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.geometry import Geometry
from meanbank.core.values import BankedValues
from meanbank.values.base import Place, ValueSource, ValueSourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bank(ValueSourceConfig, tag="bank"):
    """`v_p = gamma * table[token id at p]`: no projection, no value residual, no token shift.

    scale: gamma is one learned number (starts at 1, unbounded), or fixed at 1.
    """

    scale: Literal["learned", "fixed"] = "learned"
    needs_token_ids = True

    def build(self, geometry: Geometry, place: Place) -> "BankValues":
        return BankValues(self, geometry, place)


class BankValues(ValueSource):
    """Parameters: table (vocabulary, Hkv * Dv) and, if learned, the scale."""

    def __init__(self, config: Bank, geometry: Geometry, place: Place) -> None:
        super().__init__()
        self.geometry = geometry
        self.table = nn.Parameter(torch.empty(place.vocabulary, geometry.value_width))
        if config.scale == "learned":
            self.scale = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x, context, state):
        assert context.token_ids is not None  # the model has refused embeddings alone
        values = BankedValues(context.token_ids, self.table, self.scale, self.geometry.num_kv_heads)
        return values, None

    def publish(self, embedding: Tensor, context: Context) -> Tensor:
        assert context.token_ids is not None
        return F.embedding(context.token_ids, self.table) * self.scale

    def stored_nbytes(self, dtype: torch.dtype) -> int:
        return torch.int32.itemsize

    @property
    def tail_width(self) -> int:
        return 0

    @torch.no_grad()
    def start_from(self, inputs: Tensor) -> Tensor:
        """Start values: what a freshly drawn W_V, dropped afterwards, makes of `inputs`
        (vocabulary, hidden_size), each token's layer input at step 0. Returns the table."""
        projection = nn.Linear(inputs.shape[1], self.table.shape[1], bias=False)
        return F.linear(inputs, projection.weight.to(inputs))
