"""Start values (KVM paper, appendix; banks as in the BoV paper, on this backbone's inputs).

Every function of `init` leaves a parameter alone that was loaded from a file.
"""

from collections.abc import Sequence

from torch import nn
from transformers import initialization as init

from meanbank.model.gptalpha2 import Block


def initialize_backbone(
    embedding: nn.Embedding,
    embedding_norm: nn.LayerNorm,
    blocks: Sequence[Block],
    final_norm: nn.LayerNorm,
    style: str,
) -> None:
    """Embedding, norms and blocks; tables last, from the final start values of the embedding."""
    if style == "kvm":
        init.uniform_(embedding.weight, -1e-4, 1e-4)
    else:
        init.normal_(embedding.weight, std=0.02)
    inner = (module for block in blocks for module in block.modules())
    for module in (embedding_norm, *inner, final_norm):
        if isinstance(module, nn.Linear):  # PyTorch's own default
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
    for layer, block in enumerate(blocks):
        ratio = 1 - layer / len(blocks)
        block.attention.initialize(ratio)
        block.mlp.initialize(ratio)
        if style == "kvm":
            init.zeros_(block.attention.output_projection.weight)
            init.zeros_(block.mlp.down.weight)
            init.orthogonal_(block.mlp.up.weight)
    for block in blocks:
        block.initialize_table(lambda: embedding_norm(embedding.weight))


def initialize_head(head: nn.Linear, style: str) -> None:
    """The output head, vocabulary x width."""
    vocabulary, width = head.weight.shape
    if style == "kvm":
        init.orthogonal_(head.weight, gain=0.5 * (vocabulary / width) ** 0.5)
    else:
        init.normal_(head.weight, std=0.5 * width**-0.5)
