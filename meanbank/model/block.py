"""A block: a mixer and an MLP around the residual stream, on either backbone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from meanbank.core.context import Context
from meanbank.core.state import State, check_kind, check_like
from meanbank.core.tail import Tail, tail_like, tail_nbytes
from meanbank.model.attention import SoftmaxAttention
from meanbank.model.config import MeanbankConfig
from meanbank.model.layers import MLP
from meanbank.model.mixer import Mixer
from meanbank.model.plan import LayerPlan
from meanbank.model.rwkv7 import TimeMix
from meanbank.values import Place

# A memory is the third part of softmax attention, but for one that is a mixer by itself.
MIXERS: dict[str, type[Mixer]] = {"rwkv7": TimeMix}


def make_blocks(config: MeanbankConfig) -> nn.ModuleList:
    """All blocks of a model."""
    layers = zip(config.plans(), config.places(), strict=True)
    return nn.ModuleList(Block(config, plan, place) for plan, place in layers)


@dataclasses.dataclass(frozen=True)
class BlockState(State):
    """Everything one block carries from call to call; mlp is its shift tail."""

    attention: State
    mlp: Tail | None


class Block(GradientCheckpointingLayer):
    """`x += scale * mixer(norm(x))`, then `x += scale * MLP(norm(x))`.

    A new state never changes an old one, so a checkpointed block may go on from a cache: when the
    backward pass runs it again, it reads the same state.
    """

    def __init__(self, config: MeanbankConfig, plan: LayerPlan, place: Place) -> None:
        super().__init__()
        backbone, width = config.backbone_parts, config.hidden_size
        self.place, self.residual_scale = place, config.residual_scale
        self.reads_shared_table = plan.values.uses_shared_table
        mixer = MIXERS.get(plan.memory.tag, SoftmaxAttention)
        self.attention_norm = backbone.norm(width)
        self.attention: Mixer = mixer(plan, config.geometry(plan), place, backbone)
        self.mlp_norm = backbone.norm(width)
        assert config.intermediate_size is not None  # the configuration fills these in
        assert config.mlp_token_shift is not None
        self.mlp = MLP(width, config.intermediate_size, config.mlp_token_shift)

    def forward(
        self, x: Tensor, context: Context, state: BlockState | None
    ) -> tuple[Tensor, Context, BlockState]:
        """x (B, T, hidden_size); returns the stream, the context for later blocks, the state."""
        normed = self.attention_norm(x)
        mixed = None if state is None else state.attention
        start: Any = None
        if self.place.publishes or self.attention.uses_start:
            start = normed if self.place.layer == 0 else self.attention_norm(context.embedding)
        if self.place.publishes:
            published = self.attention.publish(start, context, mixed)
            context = context.publish(self.place.layer, published)
        change, mixed = self.attention(normed, start, context, mixed)
        x = x + self.residual_scale * change
        change, mlp = self.mlp(self.mlp_norm(x), state and state.mlp, context.layout)
        x = x + self.residual_scale * change
        return x, context, BlockState(mixed, mlp)

    def initialize_table(
        self,
        x0: Callable[[], Tensor],
        draw: Callable[[int, int], Tensor],
        shared: nn.Parameter | None,
    ) -> None:
        """Fill a table over token ids from x0 of every token id alone (vocabulary, hidden_size)."""
        self.attention.initialize_table(lambda: self.attention_norm(x0()), draw, shared)

    def check_state(self, state: Any, seen: tuple[int, ...]) -> None:
        """See `Mixer.check_state`."""
        check_kind(state, BlockState)
        self.attention.check_state(state.attention, seen)
        check_like(state.mlp, tail_like(len(seen), self.mlp.tail_width, torch.float32), "mlp")

    def state_like(self, tokens: int, batch: int, dtype: torch.dtype) -> BlockState:
        """See `Mixer.state_like`."""
        mlp = tail_like(batch, self.mlp.tail_width, dtype)
        return BlockState(self.attention.state_like(tokens, batch, dtype), mlp)

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, undo: int = 0) -> int:
        """A bound on the bytes that its state holds within the first `tokens` tokens, where `undo`
        of them can be forgotten."""
        mlp = batch * tail_nbytes(self.mlp.tail_width, tokens, dtype, undo)
        return self.attention.state_nbytes_max(tokens, batch, dtype, undo) + mlp
