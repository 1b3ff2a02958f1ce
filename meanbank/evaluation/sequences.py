"""Evaluations that look into a model while it reads held-out documents, or recall sequences."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanbank.core.config import check_least
from meanbank.data import recall_batch
from meanbank.evaluation.base import Evaluation, Subject

SEED = 1_000_000  # of recall sequences, far from those of training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(Evaluation):
    """Settings of which tokens are read.

    count: held-out documents (recall: sequences). sequence_length: tokens that are read of each;
    by default those of a training sequence. pairs: recall: of a sequence; by default as in training
    last.
    """

    count: int = 8
    sequence_length: int | None = None
    pairs: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "count", "sequence_length", "pairs")

    def length(self, subject: Subject) -> int:
        """Tokens that are read of each document or sequence."""
        if self.sequence_length is not None:
            return self.sequence_length
        if subject.recall is not None:
            return subject.recall.curriculum[-1].length
        return subject.known_training_length("sequence_length")

    def numbers(self, subject: Subject) -> list[int]:
        """Of the documents or sequences, for `tokens`; ValueError where none is long enough."""
        if subject.recall is not None:
            return list(range(self.count))
        held_out, length = subject.corpus.held_out, self.length(subject)
        numbers: Iterable[Any] = held_out.documents_at_least(length)[: self.count]
        found = [int(number) for number in numbers]
        if not found:
            raise ValueError(
                f"no held-out document has {length} tokens, the longest has "
                f"{held_out.lengths.max()}; give a smaller sequence_length"
            )
        return found

    def tokens(self, subject: Subject, number: int) -> Tensor:
        """Of one document or sequence: (T,)."""
        length, config = self.length(subject), subject.recall
        if config is None:
            tokens = subject.corpus.held_out.document(number)[:length]
            return torch.from_numpy(tokens.astype(np.int64))
        pairs = config.curriculum[-1].pairs[-1] if self.pairs is None else self.pairs
        generator = torch.Generator().manual_seed(SEED + number)
        return recall_batch(generator, 1, length, pairs, config).input_ids[0]
