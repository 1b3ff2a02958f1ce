"""Windows of held-out text, and the losses of their tokens."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from meanbank.core.config import check_least
from meanbank.data.batches import document_ids
from meanbank.evaluation.base import Evaluation, Record, Subject, prompt_hash
from meanbank.evaluation.losses import token_losses

DEFAULT_LENGTH = 1024


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows(Evaluation):
    """Windows of held-out text, each read from a fresh start.

    sequence_length: predictions a window; default the subject's training length, or 1,024.
    max_tokens: at most that many held-out tokens, evenly spread; default all full windows.
    Where documents were kept apart in training, they are here.
    """

    sequence_length: int | None = None
    max_tokens: int | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        check_least(self, 1, "sequence_length", "max_tokens", "batch_size")

    @property
    def batch(self) -> int:
        return self.batch_size

    def length(self, subject: Subject) -> int:
        """Predictions a window."""
        return self.sequence_length or subject.training_length or DEFAULT_LENGTH

    def starts(self, subject: Subject) -> list[int]:
        """First positions of the windows in the held-out stream."""
        return window_starts(
            len(subject.corpus.held_out.tokens), self.length(subject), self.max_tokens
        )

    def losses(self, subject: Subject, starts: Sequence[int]) -> list[Record]:
        """A record a window: `nats`, `tokens` and `bytes` of the targets that stand for bytes."""
        corpus, length = subject.corpus, self.length(subject)
        stream = corpus.held_out.tokens
        rows = [stream[start : start + length + 1].astype(np.int64) for start in starts]
        tokens = torch.from_numpy(np.stack(rows))
        documents = document_ids(tokens, corpus.end_of_text_id) if subject.isolated else None
        losses = token_losses(
            subject.model, tokens, prefix=subject.prefix, document_ids=documents
        ).double()
        sizes = torch.from_numpy(np.asarray(corpus.token_bytes, dtype=np.int64))[tokens[:, 1:]]
        return [
            {
                "prompt": prompt_hash(row),
                "nats": row_losses[row_sizes > 0].sum().item(),
                "tokens": int((row_sizes > 0).sum()),
                "bytes": int(row_sizes.sum()),
            }
            for row, row_losses, row_sizes in zip(tokens, losses, sizes, strict=True)
        ]


def bits_per_byte(bits: float, size: int) -> float:
    """The quotient; ValueError where windows hold nothing but ends of documents."""
    if not size:
        raise ValueError("the held-out windows hold no text: take longer ones, or more")
    return bits / size


def summed(records: Sequence[Record]) -> dict[str, Any]:
    """The losses of windows together: `bpb`, `nats_per_token`, `tokens`, `bytes`, `windows`."""
    nats, tokens, size = (sum(r[name] for r in records) for name in ("nats", "tokens", "bytes"))
    return {
        "bpb": bits_per_byte(nats / math.log(2), size),
        "nats_per_token": nats / tokens,
        "tokens": tokens,
        "bytes": size,
        "windows": len(records),
    }
