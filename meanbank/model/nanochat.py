"""The nanochat-style backbone of the BoV paper (arXiv 2606.02780, section 4).

`x0 = smear(RMSNorm(embedding))`; a block adds `attention(RMSNorm(x))`, then `MLP(RMSNorm(x))`;
norms have no weights. Queries and keys are rotated whole, in half-split pairs, then normalised a
head and multiplied by 1.2 each. Logits are `15 tanh(z / 15)`.
"""

import functools

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops, linear_flops
from meanbank.core.geometry import Geometry
from meanbank.core.layout import Layout
from meanbank.core.tail import Tail, tail_like, tail_nbytes
from meanbank.model.backbone import Backbone, StartValues, Stem, default_linear
from meanbank.model.layers import Address
from meanbank.model.plan import AddressPlan
from meanbank.ops.rotary import Rotation, apply_rotary, rotary_angles

SMEAR_CHANNELS = 24  # of an embedding, which the smear's gate reads
HEAD_GAIN = 1.2

rms_norm = functools.partial(
    nn.RMSNorm, eps=torch.finfo(torch.float32).eps, elementwise_affine=False
)


class SmearStem(Stem):
    """`x_t + mix * sigmoid(w x_t[:24]) * x_{t-1}` of normalised embeddings; mix starts at 0.

    It carries the last token's normalised embedding, before its own smear.
    """

    carries = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.norm = rms_norm(hidden_size)
        self.gate = nn.Linear(min(SMEAR_CHANNELS, hidden_size), 1, bias=False)
        self.mix = nn.Parameter(torch.zeros(()))

    def forward(self, embedded: Tensor, state: Tail | None, layout: Layout) -> tuple[Tensor, Tail]:
        x = self.norm(embedded)
        before = layout.before(x, state, zero=True)
        gate = self.mix * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))
        return x + gate * before, layout.last(x, state)

    def alone(self, embedded: Tensor) -> Tensor:
        return self.norm(embedded)

    def initialize(self) -> None:
        default_linear(self.gate.weight)
        init.zeros_(self.mix)

    def flops(self, tokens: int) -> Flops:
        return linear_flops(self.gate, tokens)

    def state_like(self, batch: int, dtype: torch.dtype) -> Tail | None:
        return tail_like(batch, self.hidden_size, dtype)

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, undo: int = 0) -> int:
        return batch * tail_nbytes(self.hidden_size, tokens, dtype, undo)


class NanochatAddress(Address):
    """Heads are rotated in half-split pairs, then normalised and sharpened."""

    def __init__(self, plan: AddressPlan, geometry: Geometry) -> None:
        super().__init__(plan, geometry)
        self.norm = rms_norm(geometry.key_dim)

    def place(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(positions, self.geometry.rotary_dim, self.rope_theta, "half_split")
        rotation = Rotation.by(angles)
        query, key = (apply_rotary(x, rotation, "half_split") for x in (query, key))
        if not self.normalized:
            return query, key
        return self.norm(query) * HEAD_GAIN, self.norm(key) * HEAD_GAIN


def _uniform(weight: Tensor, factor: float = 1.0) -> None:
    """U(+-sqrt 3 / sqrt(d_in)), of standard deviation 1 / sqrt(d_in), times a factor."""
    bound = factor * (3 / weight.shape[1]) ** 0.5
    init.uniform_(weight, -bound, bound)


NANOCHAT = Backbone(
    conventions=Conventions(
        rotary_fraction=1.0,
        rope_theta=1e5,
        qk_norm="per_head",
        token_shift="none",
        value_residual="none",
    ),
    residual_scale=lambda layers: 1.0,
    mlp_token_shift=False,
    logit_softcap=15.0,
    norm=rms_norm,
    address=NanochatAddress,
    stem=SmearStem,
    start_values=StartValues(
        embedding=lambda weight: init.normal_(weight, std=0.8),
        matrix=_uniform,
        mlp_up=functools.partial(_uniform, factor=0.4),
        output=init.zeros_,
        head=lambda weight: init.normal_(weight, std=0.001),
    ),
)
