"""Bank of Values: a layer's own table, indexed by token id (arXiv 2606.02780)."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.context import Context
from meanbank.core.geometry import Geometry
from meanbank.core.values import BankedValues
from meanbank.values.base import Place, ValueSource, ValueSourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bank(ValueSourceConfig, tag="bank"):
    """`v_p = gamma * table[token id at p]`: no projection, no value residual, no token shift.

    scale: gamma is one learned number (starts at 1, unbounded), or fixed at 1.
    """

    needs_token_ids: ClassVar[bool] = True

    scale: Literal["learned", "fixed"] = "learned"

    def build(self, geometry: Geometry, place: Place) -> "BankValues":
        return BankValues(self, geometry, place)


class BankValues(ValueSource):
    """Parameters: table (vocabulary, Hkv * Dv) and, if learned, the scale."""

    def __init__(self, config: Bank, geometry: Geometry, place: Place) -> None:
        super().__init__()
        self.geometry = geometry
        self.table = nn.Parameter(torch.empty(place.vocabulary, geometry.value_width))
        self.scale = nn.Parameter(torch.ones(())) if config.scale == "learned" else 1.0

    def initialize(self, ratio: float) -> None:
        if isinstance(self.scale, nn.Parameter):
            init.ones_(self.scale)

    def initialize_table(self, inputs: Callable[[], Tensor]) -> None:
        """What a freshly drawn W_V, dropped afterwards, makes of the inputs of step 0."""
        if getattr(self.table, "_is_hf_initialized", False):  # loaded from a file
            return
        start = inputs()
        projection = nn.Linear(start.shape[1], self.table.shape[1], bias=False)
        init.copy_(self.table, F.linear(start, projection.weight.to(start)))

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
