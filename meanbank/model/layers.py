"""Parts of every backbone that see neither axis: address (queries and keys) and MLP."""

import abc
import dataclasses

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.layout import Layout
from meanbank.core.state import State
from meanbank.core.tail import Tail, tail_like
from meanbank.model.plan import AddressPlan
from meanbank.ops.token_shift import shift_start, token_shift


@dataclasses.dataclass(frozen=True)
class AddressState(State):
    """Projected query and key of the last token, before the shift."""

    query: Tail
    key: Tail


class Address(nn.Module, abc.ABC):
    """Queries and keys: projection, token shift where there is one, norm and positions.

    A backbone says how heads are normalised and positions enter. The first token's predecessor is
    itself.
    """

    def __init__(self, plan: AddressPlan, geometry: Geometry) -> None:
        super().__init__()
        assert plan.rope_theta is not None
        self.geometry, self.rope_theta = geometry, plan.rope_theta
        self.normalized = plan.qk_norm == "per_head"
        query_width = geometry.num_heads * geometry.key_dim
        self.query = nn.Linear(geometry.hidden_size, query_width, bias=False)
        self.key = nn.Linear(geometry.hidden_size, geometry.key_width, bias=False)
        self.query_shift = self.key_shift = None
        if plan.token_shift == "learned":
            self.query_shift = nn.Parameter(torch.empty(query_width))
            self.key_shift = nn.Parameter(torch.empty(geometry.key_width))

    @abc.abstractmethod
    def place(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise heads (B, H, T, Dk) and rotate them by positions (T,) or (B, 1, T), in either
        order."""

    def initialize(self, ratio: float) -> None:
        """Shifts as in the KVM paper; ratio falls from 1 in the first layer."""
        if self.query_shift is not None and self.key_shift is not None:
            init.copy_(self.query_shift, shift_start(self.query_shift, 0.2 * ratio))
            init.copy_(self.key_shift, shift_start(self.key_shift, 0.7 * ratio))

    def flops(self, tokens: int) -> Flops:
        """FLOPs of the two projections of `tokens` tokens."""
        return linear_flops(self.query, tokens) + linear_flops(self.key, tokens)

    @property
    def tail_width(self) -> int:
        """Numbers that its state holds for one sequence."""
        if self.query_shift is None or self.key_shift is None:
            return 0
        return len(self.query_shift) + len(self.key_shift)

    def state_like(self, batch: int, dtype: torch.dtype) -> AddressState | None:
        """What it carries on after some token of `batch` rows, without data."""
        if self.query_shift is None or self.key_shift is None:
            return None
        tails = (tail_like(batch, len(mix), dtype) for mix in (self.query_shift, self.key_shift))
        query, key = tails
        assert query is not None and key is not None
        return AddressState(query, key)

    def forward(
        self, x: Tensor, state: AddressState | None, layout: Layout
    ) -> tuple[Tensor, Tensor, AddressState | None]:
        """x (B, T, hidden_size) -> query (B, H, T, Dk), key (B, Hkv, T, Dk)."""
        query, key, last = self.query(x), self.key(x), None
        if self.query_shift is not None and self.key_shift is not None:
            old_query, old_key = (state.query, state.key) if state else (None, None)
            last = AddressState(layout.last(query, old_query), layout.last(key, old_key))
            before = layout.before(query, old_query, zero=False)
            query = token_shift(query, self.query_shift, before)
            key = token_shift(key, self.key_shift, layout.before(key, old_key, zero=False))
        query = split_heads(query, self.geometry.num_heads)
        key = split_heads(key, self.geometry.num_kv_heads)
        positions = layout.positions(x.device)
        if positions.ndim == 2:
            positions = positions[:, None]
        query, key = self.place(query, key, positions)
        return query, key, last


class MLP(nn.Module):
    """`W_out relu(W_in x)^2`, x shifted towards the previous token (zero before the first)."""

    def __init__(self, hidden_size: int, intermediate_size: int, shifted: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(hidden_size)) if shifted else None
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def initialize(self, ratio: float) -> None:
        """The shift as in the KVM paper; ratio falls from 1 in the first layer."""
        if self.shift is not None:
            init.copy_(self.shift, shift_start(self.shift, ratio**4))

    def flops(self, tokens: int) -> Flops:
        """FLOPs of `tokens` tokens."""
        return linear_flops(self.up, tokens) + linear_flops(self.down, tokens)

    @property
    def tail_width(self) -> int:
        """Numbers that its state holds for one sequence."""
        return 0 if self.shift is None else len(self.shift)

    def forward(self, x: Tensor, last: Tail | None, layout: Layout) -> tuple[Tensor, Tail | None]:
        """x (B, T, hidden_size); last: the token before, None at the start."""
        new_last = None
        if self.shift is not None:
            new_last = layout.last(x, last)
            x = token_shift(x, self.shift, layout.before(x, last, zero=True))
        return self.down(self.up(x).relu().square()), new_last
