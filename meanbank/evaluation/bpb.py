"""Bits per byte of held-out text."""

import math
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from meanbank.core.progress import progress
from meanbank.data import PackedTokens
from meanbank.data.batches import document_ids
from meanbank.evaluation.losses import token_losses


def window_starts(total: int, length: int, max_tokens: int | None) -> list[int]:
    """Starts of windows of `length` predictions over `total` tokens, evenly spread if limited."""
    count = (total - 1) // length
    if count < 1:
        raise ValueError(
            f"the held-out split has {total} tokens, a window needs {length + 1}; use a larger "
            "corpus, a larger data.held_out_fraction or a shorter data.sequence_length"
        )
    wanted = count if max_tokens is None else max(1, min(count, max_tokens // length))
    return [index * count // wanted * length for index in range(wanted)]


def bits_per_byte(
    model: PreTrainedModel,
    held_out: PackedTokens,
    token_bytes: np.ndarray,
    *,
    sequence_length: int,
    max_tokens: int | None = None,
    batch_size: int = 8,
    isolated_by: int | None = None,
) -> dict[str, Any]:
    """Bits per byte over windows of `sequence_length` tokens, each read from a fresh start.

    token_bytes (vocabulary,): bytes each id stands for; targets of 0 bytes (end of text) are left
    out. max_tokens limits the work to evenly spread windows. isolated_by: the end-of-text token,
    where documents of a window are not to see each other.
    """
    model.eval()
    starts = window_starts(len(held_out.tokens), sequence_length, max_tokens)
    sizes = torch.from_numpy(np.asarray(token_bytes, dtype=np.int64))
    nats, counted, size = 0.0, 0, 0
    with progress("held-out bits per byte", len(starts)) as report:
        for first in range(0, len(starts), batch_size):
            group = starts[first : first + batch_size]
            rows = [held_out.tokens[s : s + sequence_length + 1].astype(np.int64) for s in group]
            tokens = torch.from_numpy(np.stack(rows))
            documents = None if isolated_by is None else document_ids(tokens, isolated_by)
            losses = token_losses(model, tokens, document_ids=documents)
            target_sizes = sizes[tokens[:, 1:]]
            nats += losses[target_sizes > 0].double().sum().item()
            counted += int((target_sizes > 0).sum())
            size += int(target_sizes.sum())
            report(len(group))
    return {
        "bpb": nats / math.log(2) / size,
        "nats_per_token": nats / counted,
        "tokens": counted,
        "bytes": size,
        "windows": len(starts),
    }
