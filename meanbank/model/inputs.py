"""What goes into a model: each check raises ValueError in one line."""

from typing import Any

import torch
from torch import Tensor

from meanbank.core.conventions import IGNORED
from meanbank.model.arrangement import Arrangement
from meanbank.model.cache import MeanbankCache
from meanbank.model.config import MeanbankConfig


def check_targets(
    targets: Tensor,
    tokens: Tensor | None,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    vocabulary: int,
) -> None:
    """Token ids or -100, one a token, and nothing that asks for logits."""
    if labels is not None or isinstance(logits_to_keep, Tensor) or logits_to_keep:
        raise ValueError("targets give losses and no logits: leave out labels and logits_to_keep")
    if tokens is not None and targets.shape != tokens.shape[:2]:
        raise ValueError(
            f"targets must have shape {tuple(tokens.shape[:2])}, one a token, got "
            f"{tuple(targets.shape)}"
        )
    if not _is_integer(targets):
        raise ValueError(f"targets must be integers, got {targets.dtype}")
    if targets.numel() and not _unseen(targets):
        counted = targets.masked_fill(targets == IGNORED, 0)
        check_within("target", counted, vocabulary)


def check_token_ids(input_ids: Tensor, vocabulary: int) -> None:
    """Integers (B, T) within the vocabulary, at least one."""
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids must be (batch, tokens) with at least one token, got shape "
            f"{tuple(input_ids.shape)}"
        )
    if not _is_integer(input_ids):
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}")
    if not _unseen(input_ids):  # the look-up then checks
        check_within("token id", input_ids, vocabulary)


def check_within(what: str, token_ids: Tensor, vocabulary: int) -> None:
    low, high = torch.stack(token_ids.aminmax()).tolist()  # a GPU is waited for once
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"{what} {wrong} is outside the vocabulary (0 to {vocabulary - 1})")


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _unseen(tensor: Tensor) -> bool:
    """Whether its numbers cannot be looked at."""
    return torch.compiler.is_compiling() or tensor.is_meta


def check_embeddings(inputs_embeds: Tensor, hidden_size: int) -> None:
    """Floating-point numbers (B, T, hidden_size), of at least one token."""
    if (
        inputs_embeds.ndim != 3
        or inputs_embeds.shape[2] != hidden_size
        or not inputs_embeds.numel()
    ):
        raise ValueError(
            f"inputs_embeds must be (batch, tokens, {hidden_size}) with at least one token, got "
            f"shape {tuple(inputs_embeds.shape)}"
        )
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds must be floating-point numbers, got {inputs_embeds.dtype}")


def one_of(cache: Any, past_key_values: Any) -> MeanbankCache | None:
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument; give one")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, MeanbankCache):
        raise ValueError(f"the cache must be a MeanbankCache, got {type(cache).__name__}")
    return cache


IGNORED_KEYWORDS = {"output_attentions", "output_router_logits"}


def check_unknown(keywords: dict[str, Any]) -> None:
    """Refuse what we do not know: silently dropped inputs give silently wrong results."""
    if keywords.get("output_attentions"):
        raise ValueError("output_attentions is not supported: attention weights are not kept")
    for name, value in keywords.items():
        if name not in IGNORED_KEYWORDS and value is not None:
            raise ValueError(f"the model does not take {name!r}: it is not supported (yet)")


def check_cache(cache: MeanbankCache, config: MeanbankConfig, batch: int) -> None:
    """A cache of the model with this config, of `batch` sequences or none."""
    if not cache.fits(config):
        raise ValueError("the cache was made by a model with other layers; make a new one")
    if cache.lengths and len(cache.lengths) != batch:
        raise ValueError(f"the cache holds {len(cache.lengths)} sequences, the input {batch}")


def new_columns(mask: Tensor | None, batch: int, columns: int, length: int) -> Tensor | None:
    """The part of an attention mask that belongs to the new tokens."""
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, columns + length):
        raise ValueError(
            f"attention_mask must have shape ({batch}, {columns + length}), got {tuple(mask.shape)}"
        )
    return mask[:, -length:]


def check_documents(document_ids: Tensor | None, batch: int, length: int) -> None:
    if document_ids is not None and document_ids.shape != (batch, length):
        raise ValueError(
            f"document_ids must have shape ({batch}, {length}), got {tuple(document_ids.shape)}"
        )


@torch.compiler.disable(reason="it raises or not, by what the tensor holds")
def check_positions(position_ids: Tensor, arrangement: Arrangement) -> None:
    layout, length = arrangement.layout, arrangement.length
    expected = layout.positions(position_ids.device).expand(layout.batch, layout.length)
    shapes = {(length,), (1, length), (layout.batch, length)}
    wrong = tuple(position_ids.shape) not in shapes
    if not wrong:
        given = arrangement.aligned(position_ids.expand(layout.batch, -1))
        differ = given != expected
        wrong = bool((differ if arrangement.valid is None else differ & arrangement.valid).any())
    if wrong:
        raise ValueError(
            "position_ids contradict the tokens seen: they must count each row's tokens, those in "
            f"the cache ({', '.join(map(str, sorted(set(layout.seen))))}) included"
        )
