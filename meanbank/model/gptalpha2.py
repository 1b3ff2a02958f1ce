"""The GPTAlpha-2 backbone (KVM paper, section 4), block by block.

`x0 = LN_emb(embedding)`; each block adds `residual_scale * attention(LN(x))`, then
`residual_scale * MLP(LN(x))`; every layer norm has weight and bias and eps 1e-5.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from meanbank.core.context import Context
from meanbank.core.state import State
from meanbank.model.attention import SoftmaxAttention
from meanbank.model.config import MeanbankConfig
from meanbank.model.layers import MLP
from meanbank.model.mixer import Mixer
from meanbank.model.plan import LayerPlan
from meanbank.values import Place


def make_blocks(config: MeanbankConfig) -> nn.ModuleList:
    """All blocks of a model."""
    layers = list(zip(config.plans(), config.places(), strict=True))
    referred_to = {plan.values.refers_to(place) for plan, place in layers}
    return nn.ModuleList(
        Block(config, plan, place, place.layer in referred_to) for plan, place in layers
    )


@dataclasses.dataclass(frozen=True)
class BlockState(State):
    """Everything one block carries from call to call; mlp (B, 1, hidden_size) is its shift tail."""

    attention: State
    mlp: Tensor | None


class Block(nn.Module):
    """Attention and MLP around a residual stream."""

    def __init__(
        self, config: MeanbankConfig, plan: LayerPlan, place: Place, publishes: bool
    ) -> None:
        """publishes: whether some layer refers to this one's values."""
        super().__init__()
        self.layer, self.publishes = place.layer, publishes
        self.residual_scale = config.residual_scale
        geometry = config.geometry(plan)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.attention: Mixer = SoftmaxAttention(plan, geometry, place, config.rope_theta)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=1e-5)
        assert config.intermediate_size is not None  # the configuration fills it in
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_token_shift)

    def forward(
        self, x: Tensor, context: Context, state: BlockState | None
    ) -> tuple[Tensor, Context, BlockState]:
        """x (B, T, hidden_size); returns the stream, the context for later blocks, the state."""
        normed = self.attention_norm(x)
        if self.publishes:
            start = normed if self.layer == 0 else self.attention_norm(context.embedding)
            published = self.attention.publish(start, context)
            context = context.publish(self.layer, published)
        change, attention = self.attention(normed, context, state and state.attention)
        x = x + self.residual_scale * change
        change, mlp = self.mlp(self.mlp_norm(x), None if state is None else state.mlp)
        x = x + self.residual_scale * change
        return x, context, BlockState(attention, mlp)

    def initialize_table(self, x0: Callable[[], Tensor]) -> None:
        """Fill a table over token ids from x0 of every token id alone (vocabulary, hidden_size)."""
        self.attention.initialize_table(lambda: self.attention_norm(x0()))

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype) -> int:
        """A bound on the bytes that its state holds within the first `tokens` tokens."""
        mlp = batch * self.mlp.tail_width * dtype.itemsize
        return self.attention.state_nbytes_max(tokens, batch, dtype) + mlp
