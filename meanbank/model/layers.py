"""Parts of the backbone that see neither axis: address (queries and keys) and MLP."""

import dataclasses

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.geometry import Geometry, split_heads
from meanbank.core.layout import Layout
from meanbank.core.state import State
from meanbank.ops.rotary import apply_rotary, rotary_angles
from meanbank.ops.token_shift import shift_start, token_shift


@dataclasses.dataclass(frozen=True)
class AddressState(State):
    """Projected query and key of the last token, before the shift: (B, 1, width) each."""

    query: Tensor
    key: Tensor


class Address(nn.Module):
    """Queries and keys: projection, token shift, layer norm a head, partial rotary positions.

    The first token's predecessor is itself.
    """

    def __init__(self, geometry: Geometry, rope_theta: float) -> None:
        super().__init__()
        self.geometry, self.rope_theta = geometry, rope_theta
        query_width = geometry.num_heads * geometry.key_dim
        self.query = nn.Linear(geometry.hidden_size, query_width, bias=False)
        self.key = nn.Linear(geometry.hidden_size, geometry.key_width, bias=False)
        self.query_shift = nn.Parameter(torch.empty(query_width))
        self.key_shift = nn.Parameter(torch.empty(geometry.key_width))
        self.query_norm = nn.LayerNorm(geometry.key_dim, eps=1e-5)
        self.key_norm = nn.LayerNorm(geometry.key_dim, eps=1e-5)

    def initialize(self, ratio: float) -> None:
        """Shifts as in the paper; ratio falls from 1 in the first layer."""
        init.copy_(self.query_shift, shift_start(self.query_shift, 0.2 * ratio))
        init.copy_(self.key_shift, shift_start(self.key_shift, 0.7 * ratio))

    @property
    def tail_width(self) -> int:
        """Numbers that its state holds for one sequence."""
        return len(self.query_shift) + len(self.key_shift)

    def forward(
        self, x: Tensor, state: AddressState | None, layout: Layout
    ) -> tuple[Tensor, Tensor, AddressState]:
        """x (B, T, hidden_size) -> query (B, H, T, Dk), key (B, Hkv, T, Dk)."""
        query, key = self.query(x), self.key(x)
        last = AddressState(query[:, -1:].clone(), key[:, -1:].clone())
        before = state or AddressState(query[:, :1], key[:, :1])
        query = token_shift(query, self.query_shift, before.query)
        key = token_shift(key, self.key_shift, before.key)
        query = self.query_norm(split_heads(query, self.geometry.num_heads))
        key = self.key_norm(split_heads(key, self.geometry.num_kv_heads))
        positions = layout.positions(x.device)
        angles = rotary_angles(positions, self.geometry.rotary_dim, self.rope_theta)
        return apply_rotary(query, angles), apply_rotary(key, angles), last


class MLP(nn.Module):
    """`W_out relu(W_in x)^2`, x shifted towards the previous token (zero before the first)."""

    def __init__(self, hidden_size: int, intermediate_size: int, shifted: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(hidden_size)) if shifted else None
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def initialize(self, ratio: float) -> None:
        """The shift as in the paper; ratio falls from 1 in the first layer."""
        if self.shift is not None:
            init.copy_(self.shift, shift_start(self.shift, ratio**4))

    @property
    def tail_width(self) -> int:
        """Numbers that its state holds for one sequence."""
        return 0 if self.shift is None else len(self.shift)

    def forward(self, x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x (B, T, hidden_size); last (B, 1, hidden_size): the token before, None at the start."""
        new_last = None
        if self.shift is not None:
            new_last = x[:, -1:].clone()
            x = token_shift(x, self.shift, torch.zeros_like(x[:, :1]) if last is None else last)
        return self.down(self.up(x).relu().square()), new_last
