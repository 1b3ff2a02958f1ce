"""What a model costs, by part: parameters, and FLOPs of one sequence.

Both work on a model without weights, see `empty_model`.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from meanbank.core.flops import Flops, linear_flops, products
from meanbank.memory import MemoryConfig, SlidingWindow
from meanbank.model.attention import SoftmaxAttention
from meanbank.model.block import Block
from meanbank.model.config import MeanbankConfig
from meanbank.model.mixer import Mixer
from meanbank.model.modeling import MeanbankForCausalLM
from meanbank.values.mixed import MixedValues

# Part -> the names of its parameters, from the left of what follows `model.` or `model.layers.N.`;
# the first that fits counts.
PARAMETER_PARTS = {
    "embedding": r"embedding\.",
    "head": r"lm_head\.",
    "queries and keys": r"attention\.(address\.(query|key)|receptance|key)\.weight$",
    "value projections": r"attention\.values\.(\w+\.)*projection\.",
    "value residuals and gates": r"attention\.values\.(\w+\.)*(residual|gate)\.",
    "bank tables": r"(attention\.values\.(\w+\.)*table|shared_table)$",
    "scales and mixture coefficients": r"attention\.values\.(\w+\.)*(scale|\w+_weight)$",
    "memory": r"attention\.(memory|decay|rate|gate)\.|attention\.(removal|replacement|bonus)$",
    "output projections": r"attention\.output\.",
    "MLP": r"mlp\.(up|down)\.",
    "norms": r"(attention\.(address\.)?|stem\.)?(\w+_)?norm\.",
    "shifts": r"(attention|mlp)\.(\w+\.)*(\w+_)?shift(s\.\w+)?$",
    "rest": r"",
}
# Where the weights of linear maps count; all others are those of projections.
FLOPS_PART_OF = {
    "head": "head",
    "value projections": "values",
    "value residuals and gates": "values",
    "MLP": "MLP",
}
FLOPS_PARTS: tuple[str, ...] = ("attention", "projections", "values", "MLP", "head", "stem")


def empty_model(config: MeanbankConfig) -> MeanbankForCausalLM:
    """The model on torch's meta device: every shape, no memory and no start values."""
    with torch.device("meta"):
        return MeanbankForCausalLM(config)


def part_of(name: str) -> str:
    """The part that a parameter belongs to, a key of `PARAMETER_PARTS`."""
    local = re.sub(r"^model\.(layers\.\d+\.)?", "", name)
    return next(part for part, names in PARAMETER_PARTS.items() if re.match(names, local))


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Number of parameters of each part that has some; the sum is that of all parameters."""
    counts = dict.fromkeys(PARAMETER_PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return {part: count for part, count in counts.items() if count}


def flops_by_part(model: MeanbankForCausalLM, tokens: int) -> dict[str, Flops]:
    """FLOPs of one sequence of `tokens` tokens from empty, with logits for each, by part."""
    backbone: Any = model.model
    parts: dict[str, Flops] = dict.fromkeys(FLOPS_PARTS, Flops())
    for block in cast(Iterable[Block], backbone.layers):
        for part, flops in block.attention.flops_by_part(tokens).items():
            parts[part] += flops
        parts["MLP"] += block.mlp.flops(tokens)
    parts["head"] += linear_flops(model.lm_head, tokens)
    parts["stem"] += backbone.stem.flops(tokens)
    return parts


def papers_flops_by_part(model: MeanbankForCausalLM, tokens: int) -> dict[str, Flops]:
    """FLOPs of one sequence of `tokens` tokens as the BoV authors count them, by part.

    A token costs 6 for each weight of a linear map (2 forward, 4 backward), the head's included and
    the smear's not, and 12 heads * head_dim * min(window, tokens) a layer, as if every query saw a
    whole window. A mixture with the initial embedding uses its W_V twice. Their window of N shows
    N + 1 tokens and counts as N, and so does a sliding window of N + 1 here. They have no other
    memory: elsewhere the window is all the rows that a query can see, and RWKV-7 is counted as it
    is.
    """
    backbone: Any = model.model
    parts: dict[str, Flops] = dict.fromkeys(FLOPS_PARTS, Flops())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("model.stem."):
            part = FLOPS_PART_OF.get(part_of(f"{name}.weight"), "projections")
            parts[part] += linear_flops(module, tokens)
    layers = cast(Iterable[Block], backbone.layers)
    for plan, block in zip(model.config.plans(), layers, strict=True):
        parts["attention"] += _papers_attention(plan.memory, block.attention, tokens)
        values = block.attention.values
        if isinstance(values, MixedValues) and values.other is None:
            parts["values"] += linear_flops(values.contextual.projection, tokens)
    return parts


def _papers_attention(config: MemoryConfig, mixer: Mixer, tokens: int) -> Flops:
    if not isinstance(mixer, SoftmaxAttention):
        return mixer.flops_by_part(tokens)["attention"]
    rows = min(mixer.memory.rows_max(tokens), tokens)
    if isinstance(config, SlidingWindow):
        rows = min(config.window - 1 + config.sink, tokens)
    sizes = mixer.geometry
    return products(tokens * rows * sizes.num_heads * (sizes.key_dim + sizes.value_dim))
