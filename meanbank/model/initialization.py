"""Start values (KVM paper, appendix; banks as in the BoV paper, on this backbone's inputs).

Every function of `init` leaves a parameter alone that was loaded from a file.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.model.gptalpha2 import Block
from meanbank.values.bank import BankValues
from meanbank.values.projected import ProjectedValues


def initialize_backbone(
    embedding: nn.Embedding,
    embedding_norm: nn.LayerNorm,
    blocks: Sequence[Block],
    final_norm: nn.LayerNorm,
    style: str,
) -> None:
    """Embedding, norms and blocks; banks last, from the final start values of the embedding."""
    if style == "kvm":
        init.uniform_(embedding.weight, -1e-4, 1e-4)
    else:
        init.normal_(embedding.weight, std=0.02)
    inner = (module for block in blocks for module in block.modules())
    for module in (embedding_norm, *inner, final_norm):
        if isinstance(module, nn.Linear):
            initialize_linear(module)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
    for block in blocks:
        initialize_block(block, len(blocks), style)
    for block in blocks:
        initialize_bank(block, embedding_norm(embedding.weight))


def initialize_head(head: nn.Linear, style: str) -> None:
    """The output head, vocabulary x width."""
    vocabulary, width = head.weight.shape
    if style == "kvm":
        init.orthogonal_(head.weight, gain=0.5 * (vocabulary / width) ** 0.5)
    else:
        init.normal_(head.weight, std=0.5 * width**-0.5)


def initialize_linear(linear: nn.Linear) -> None:
    """PyTorch's own default, U(+-1 / sqrt(inputs))."""
    bound = linear.in_features**-0.5
    init.uniform_(linear.weight, -bound, bound)


def initialize_block(block: Block, num_layers: int, style: str) -> None:
    """Start values of one block; plain linear maps and norms have theirs already."""
    ratio = 1 - block.layer / num_layers
    attention, address = block.attention, block.attention.address
    if style == "kvm":
        init.zeros_(attention.output.weight)
        init.zeros_(block.mlp.down.weight)
        init.orthogonal_(block.mlp.up.weight)
    init.copy_(address.query_shift, shift_start(address.query_shift, 0.2 * ratio))
    init.copy_(address.key_shift, shift_start(address.key_shift, 0.7 * ratio))
    if block.mlp.shift is not None:
        init.copy_(block.mlp.shift, shift_start(block.mlp.shift, ratio**4))
    if isinstance(attention.values, ProjectedValues):
        init.copy_(attention.values.shift, shift_start(attention.values.shift, 0.7 * ratio))
        residual = attention.values.residual
        if residual is not None:
            ramp = torch.linspace(-0.5, 0.5, len(residual.base), device=residual.base.device)
            init.copy_(residual.base, (0.73 - 0.4 * ramp).to(residual.base))
            init.zeros_(residual.down.weight)
            init.orthogonal_(residual.up.weight, gain=0.1)
    memory = attention.memory
    for name, parameter in memory.named_parameters(recurse=False):
        if name.endswith("temperature"):
            init.ones_(parameter)


def shift_start(like: Tensor, power: float) -> Tensor:
    """`1 - (i / width) ** power` for channels i."""
    channels = torch.arange(len(like), device=like.device, dtype=torch.float64)
    return (1 - (channels / len(like)) ** power).to(like.dtype)


def initialize_bank(block: Block, embedded: Tensor) -> None:
    """Fill a block's bank with what its layer would compute for every token alone at step 0.

    embedded: (vocabulary, hidden_size), x0 of every token id under the final start values.
    """
    values = block.attention.values
    if isinstance(values, BankValues):
        if isinstance(values.scale, nn.Parameter):
            init.ones_(values.scale)
        init.copy_(values.table, values.start_from(block.attention_norm(embedded)))
