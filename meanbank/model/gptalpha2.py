"""The GPTAlpha-2 backbone (KVM paper, section 4).

`x0 = LN(embedding)`; a block adds `12 / layers * attention(LN(x))`, then the same of the MLP; every
layer norm has weight and bias. Projected queries, keys and values are shifted towards the previous
token's, values are mixed with the first layer's before that, and heads of queries and keys are
normalised before their first half is rotated by position.
"""

import functools

from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.conventions import Conventions
from meanbank.core.geometry import Geometry
from meanbank.core.layout import Layout
from meanbank.model.backbone import Backbone, StartValues, Stem, default_linear
from meanbank.model.layers import Address
from meanbank.model.plan import AddressPlan
from meanbank.ops.rotary import Rotation, apply_rotary, rotary_angles

layer_norm = functools.partial(nn.LayerNorm, eps=1e-5)


class NormStem(Stem):
    """`x0 = LN(embedding)`."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.norm = layer_norm(hidden_size)

    def forward(self, embedded: Tensor, state: None, layout: Layout) -> tuple[Tensor, None]:
        return self.norm(embedded), None

    def alone(self, embedded: Tensor) -> Tensor:
        return self.norm(embedded)


class GPTAlpha2Address(Address):
    """Heads are layer-normalised, then rotated in interleaved pairs."""

    def __init__(self, plan: AddressPlan, geometry: Geometry) -> None:
        super().__init__(plan, geometry)
        self.query_norm = self.key_norm = nn.Identity()
        if self.normalized:
            self.query_norm = layer_norm(geometry.key_dim)
            self.key_norm = layer_norm(geometry.key_dim)

    def place(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = rotary_angles(positions, self.geometry.rotary_dim, self.rope_theta)
        rotation = Rotation.by(angles)
        query, key = self.query_norm(query), self.key_norm(key)
        return apply_rotary(query, rotation), apply_rotary(key, rotation)


def _orthogonal_head(weight: Tensor) -> None:
    vocabulary, width = weight.shape
    init.orthogonal_(weight, gain=0.5 * (vocabulary / width) ** 0.5)


GPTALPHA2 = Backbone(
    conventions=Conventions(
        rotary_fraction=0.5,
        rope_theta=1e4,
        qk_norm="per_head",
        token_shift="learned",
        value_residual="gated",
    ),
    residual_scale=lambda layers: 12 / layers,  # CompleteP with alpha 1
    mlp_token_shift=True,
    logit_softcap=None,
    norm=layer_norm,
    address=GPTAlpha2Address,
    stem=NormStem,
    start_values=StartValues(
        embedding=lambda weight: init.uniform_(weight, -1e-4, 1e-4),
        matrix=default_linear,
        mlp_up=init.orthogonal_,
        output=init.zeros_,
        head=_orthogonal_head,
    ),
)
