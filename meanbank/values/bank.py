"""Bank of Values: a layer's own table, indexed by token id (arXiv 2606.02780)."""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.context import Context
from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops
from meanbank.core.geometry import Geometry
from meanbank.core.table import Table, look_up
from meanbank.core.values import banked
from meanbank.values.base import Place, ValueSource, ValueSourceConfig, learned_or, restart, scaled
from meanbank.values.parts import Scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bank(ValueSourceConfig, tag="bank"):
    """`v_p = gamma * table[token id at p]`: no projection, no value residual, no token shift.

    scale: gamma is one learned number (starts at 1, unbounded; the default), or fixed at 1.
    table: "own", one for each layer, or "shared", one for all layers that say so.
    """

    needs_token_ids: ClassVar[bool] = True
    reads_stream: ClassVar[bool] = False

    scale: Literal["learned", "fixed"] | None = None
    table: Literal["own", "shared"] = "own"

    def resolved(self, conventions: Conventions, first_layer: int = 0) -> "Bank":
        return dataclasses.replace(self, scale=self.scale or "learned")

    def build(self, geometry: Geometry, place: Place) -> "BankValues":
        return BankValues(self, geometry, place)

    @property
    def uses_shared_table(self) -> bool:
        return self.table == "shared"


class BankValues(ValueSource):
    """Parameters: its own table (vocabulary, Hkv * Dv), unless shared, and a learned scale."""

    def __init__(self, config: Bank, geometry: Geometry, place: Place) -> None:
        super().__init__(geometry, place)
        self.table = None
        if config.table == "own":
            self.table = nn.Parameter(torch.empty(place.vocabulary, geometry.value_width))
        self.scale = learned_or(1.0, config.scale != "fixed")

    def initialize(self, ratio: float) -> None:
        restart(self.scale)

    def initialize_table(self, inputs, draw, shared=None):
        """What a fresh W_V, dropped afterwards, makes of the inputs of step 0 (section 3)."""
        table = shared if self.table is None else self.table
        if getattr(table, "_is_hf_initialized", False):  # loaded from a file
            return
        if table is None or table.is_meta:  # has no numbers (yet)
            return
        start = inputs()
        init.copy_(table, F.linear(start, draw(table.shape[1], start.shape[1]).to(start)))

    def rows_of(self, context: Context) -> tuple[Tensor, Table]:
        """Token ids (B, T) and the table that they index."""
        table = context.shared_table if self.table is None else self.table
        assert context.token_ids is not None  # the model has refused embeddings alone
        assert table is not None
        return context.token_ids, table

    def forward(self, x, start, context, state):
        token_ids, table = self.rows_of(context)
        heads, sparse = self.geometry.num_kv_heads, self.sparse_gradients
        return banked(token_ids, table, self.scale, heads, sparse), None

    def parts(self, shared):
        return [Scaled("bank", self, "scale", shared if self.table is None else self.table)]

    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        rows = look_up(*self.rows_of(context), self.sparse_gradients)
        return scaled(rows, self.scale)

    def forward_flops(self, tokens: int) -> Flops:
        return Flops()  # looked up

    def publish_flops(self, tokens: int) -> Flops:
        return Flops()

    @property
    def stores_token_ids(self) -> bool:
        return True
