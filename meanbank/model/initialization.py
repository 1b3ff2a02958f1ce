"""Start values of a whole model.

A `StartValues` says how matrices start; modules with other needs fill their own parameters after
that. Every function of `init` leaves a parameter alone that was loaded from a file.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.model.backbone import StartValues, Stem, default_linear
from meanbank.model.block import Block

# A start without the zeros of the papers, for models of a layer or two.
PLAIN = StartValues(
    embedding=lambda weight: init.normal_(weight, std=0.02),
    matrix=default_linear,
    mlp_up=lambda weight: None,
    output=lambda weight: None,
    head=lambda weight: init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5),
)


def initialize_backbone(
    start: StartValues,
    embedding: nn.Embedding,
    stem: Stem,
    blocks: Sequence[Block],
    final_norm: nn.Module,
    shared_table: nn.Parameter | None,
) -> None:
    """Embedding, norms and blocks; tables last, from the final start values of the embedding."""
    start.embedding(embedding.weight)
    for part in (stem, *blocks, final_norm):
        for module in part.modules():
            if isinstance(module, nn.Linear):
                start.matrix(module.weight)
            elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
                init.ones_(module.weight)
                init.zeros_(module.bias)
    stem.initialize()
    for layer, block in enumerate(blocks):
        ratio = 1 - layer / len(blocks)
        block.attention.initialize(ratio)
        block.mlp.initialize(ratio)
        start.output(block.attention.output_projection.weight)
        start.output(block.mlp.down.weight)
        start.mlp_up(block.mlp.up.weight)

    def draw(*shape: int) -> Tensor:
        weight = torch.empty(*shape, device=embedding.weight.device)
        start.matrix(weight)
        return weight

    def x0() -> Tensor:
        return stem.alone(embedding.weight)

    first = next((block for block in blocks if block.reads_shared_table), None)
    for block in blocks:
        block.initialize_table(x0, draw, shared_table if block is first else None)
