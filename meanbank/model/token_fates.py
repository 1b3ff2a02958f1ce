"""Where the tokens of a text went in each layer's memory of compressed rows."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from meanbank.memory import KVM, MemoryConfig
from meanbank.memory.operator import OperatorState
from meanbank.model.attention import AttentionState
from meanbank.model.block import BlockState
from meanbank.model.cache import MeanbankCache
from meanbank.model.inspection import CacheDescription
from meanbank.model.modeling import MeanbankForCausalLM

FATES = ("sink", "own row", "merged", "window")
SINK, OWN_ROW, MERGED, WINDOW = range(len(FATES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFates:
    """What one layer did with the tokens of one sequence.

    memory: its type; heads: the key/value heads that are told of; rows: (heads, T) int32, the row
    that each token went into, -1 while it is exact; fates: (heads, T) int8, indices in `FATES`:
    "own row" for tokens that opened a row, "sink" for those among them whose row nothing is merged
    into, "merged" for those that went into an earlier one, "window" for exact ones.
    """

    layer: int
    memory: str
    heads: tuple[int, ...]
    rows: np.ndarray
    fates: np.ndarray


def read_fates(
    model: MeanbankForCausalLM,
    token_ids: Sequence[int],
    layer: int | None = None,
    head: int | None = None,
) -> tuple[CacheDescription, list[LayerFates]]:
    """Read tokens into a new cache and tell where they went, in each layer that has rows.

    layer, head: only that one. Raises ValueError where there is no such layer or head, or none with
    rows, and where all tokens are still exact.
    """
    if not token_ids:
        raise ValueError("the text is empty")
    cache = model.model.new_cache()
    cache.activate_provenance()
    with torch.inference_mode():
        model.prefill(torch.tensor([list(token_ids)], device=model.device), cache=cache)
    plans = model.config.plans()
    if layer is not None and not 0 <= layer < len(plans):
        raise ValueError(f"there is no layer {layer}: the model has {len(plans)}")
    wanted = [number for number in range(len(plans)) if layer in (None, number)]
    found = [number for number in wanted if has_rows(cache, number)]
    if not found:
        memories = ", ".join(dict.fromkeys(plans[number].memory.tag for number in wanted))
        whose = "no layer has" if layer is None else f"layer {layer} has no"
        raise ValueError(f"{whose} compressed rows to tell of; memory: {memories}")
    heads = model.config.num_key_value_heads or 0
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"there is no key/value head {head}: the model has {heads}")
    fates = [_fates(cache, number, plans[number].memory, head) for number in found]
    if all((told.fates == WINDOW).all() for told in fates):
        raise ValueError(
            f"all {len(token_ids)} tokens are still in the exact window: read a longer text or "
            "more of it"
        )
    return cache.describe(), fates


def has_rows(cache: MeanbankCache, layer: int) -> bool:
    """Whether a layer of a cache that has read something keeps compressed rows."""
    state = cache.layers[layer].state
    if not isinstance(state, BlockState) or not isinstance(state.attention, AttentionState):
        return False
    return isinstance(state.attention.memory, OperatorState)


def _fates(cache: MeanbankCache, layer: int, memory: MemoryConfig, head: int | None) -> LayerFates:
    """Of the first sequence."""
    length, found = cache.lengths[0], cache.provenance(layer)
    heads = list(range(len(found.rows))) if head is None else [head]
    rows, opened = found.rows[heads].cpu(), found.opened[heads].cpu()
    older = rows.shape[1]
    fates = torch.full((len(rows), length), WINDOW, dtype=torch.int8)
    fates[:, :older] = torch.where(opened, OWN_ROW, MERGED).to(torch.int8)
    if isinstance(memory, KVM):
        fates[:, :older][rows < memory.sink] = SINK
    every = torch.full((len(rows), length), -1, dtype=torch.int32)
    every[:, :older] = rows
    return LayerFates(
        layer=layer,
        memory=memory.tag,
        heads=tuple(heads),
        rows=every.numpy(),
        fates=fates.numpy(),
    )
