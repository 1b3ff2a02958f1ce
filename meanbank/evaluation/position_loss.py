"""Loss by token position, to several times the training length."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from meanbank.core.progress import progress
from meanbank.data import PackedTokens
from meanbank.evaluation.losses import token_losses


def position_loss(
    model: PreTrainedModel,
    held_out: PackedTokens,
    *,
    training_length: int,
    multiple: int | None = None,
    buckets_per_length: int = 4,
    max_documents: int | None = None,
) -> dict[str, Any]:
    """Mean loss in nats by position on held-out documents of `multiple * training_length` tokens.

    multiple: default the largest of 8, 4, 2, 1 for which there is a document that long.

    Every document is read once from its start. A bucket is `training_length / buckets_per_length`
    positions; `at[k]` is the mean over positions [k T / 2, k T) for k = 1, 2, 4, ... Standard
    errors are over documents. max_documents takes the first ones, so models see the same.
    """
    model.eval()
    longest = int(max(held_out.lengths))
    if multiple is None:
        multiple = next((m for m in (8, 4, 2, 1) if m * training_length <= longest), 1)
    length = multiple * training_length
    documents = held_out.documents_at_least(length)[:max_documents]
    if len(documents) == 0:
        raise ValueError(
            f"no held-out document has {length} tokens ({multiple} x the training length), the "
            f"longest has {longest}; use longer documents or a smaller --multiple"
        )
    losses = []
    with progress("loss by position", len(documents)) as report:
        for document in documents:
            tokens = held_out.document(int(document))[:length].astype(np.int64)
            losses.append(token_losses(model, torch.from_numpy(tokens)[None])[0].double())
            report(1)
    by_document = torch.stack(losses)  # (documents, length - 1); column i predicts position i + 1

    def mean(start: int, stop: int) -> dict[str, Any]:
        per_document = by_document[:, max(start - 1, 0) : stop - 1].mean(dim=1)
        error = per_document.std().item() / len(per_document) ** 0.5 if len(losses) > 1 else None
        loss = per_document.mean().item()
        return {"start": start, "stop": stop, "loss": loss, "standard_error": error}

    width = max(1, training_length // buckets_per_length)
    points = [2**k for k in range(multiple.bit_length()) if 2**k <= multiple]
    return {
        "training_length": training_length,
        "length": length,
        "documents": len(losses),
        "buckets": [mean(start, start + width) for start in range(0, length - width + 1, width)],
        "at": {str(k): mean(k * training_length // 2, k * training_length) for k in points},
    }
