"""A bigram baseline: what counting pairs of tokens achieves."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meanbank.evaluation.base import Record, Sample, Subject
from meanbank.evaluation.windows import Windows, bits_per_byte

STRENGTHS = tuple(2.0**k for k in range(12))
FEWEST = 4  # training tokens: a pair to count, and a pair to choose the strength on
TUNING_SHARE = 0.05  # last part of the training tokens, to choose the strength on


@dataclasses.dataclass(frozen=True, kw_only=True)
class BigramBits(Windows, tag="bigram"):
    """Bits per held-out byte of `p(b | a) = (count(a, b) + s p(b)) / (count(a) + s)`.

    p(b) is the add-one unigram; s is chosen on the last training tokens, and the counts then use
    the whole training split. It looks at the subject's texts only, not at the model. With the same
    settings, the windows are those of `bpb`, so both predict the same targets; those of 0 bytes
    (end of text) are left out.
    """

    def samples(self, subject: Subject) -> list[Sample]:
        train = len(subject.corpus.train.tokens)
        if train < FEWEST:
            raise ValueError(f"pairs are counted in {FEWEST} training tokens or more, not {train}")
        return [Sample(id="all", content=self.starts(subject))]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        corpus, length = subject.corpus, self.length(subject)
        train = np.asarray(corpus.train.tokens, dtype=np.int64)
        windows = [
            np.asarray(corpus.held_out.tokens[start : start + length + 1], dtype=np.int64)
            for start in samples[0].content
        ]
        cut = len(train) - max(2, int(TUNING_SHARE * len(train)))
        fitted = _Bigram(train[:cut], corpus.vocab_size)
        tuning = {s: _bits(fitted, train[cut:], s, corpus.token_bytes)[0] for s in STRENGTHS}
        strength = min(tuning, key=tuning.__getitem__)
        bigram = _Bigram(train, corpus.vocab_size)
        parts = [_bits(bigram, window, strength, corpus.token_bytes) for window in windows]
        bits, size = (sum(column) for column in zip(*parts, strict=True))
        found = {
            "bpb": bits_per_byte(bits, size),
            "strength": strength,
            "training_tokens": len(train),
        }
        return [found | {"bytes": size}]

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        return records[0]

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {self.title: results["bpb"]}


class _Bigram:
    """Sparse pair counts of a token stream."""

    def __init__(self, tokens: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.pairs, self.counts = np.unique(self._pair(tokens), return_counts=True)
        self.firsts = np.bincount(tokens[:-1], minlength=vocab_size)
        unigram = np.bincount(tokens, minlength=vocab_size) + 1
        self.unigram = unigram / unigram.sum()

    def _pair(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:-1] * self.vocab_size + tokens[1:]

    def log_probabilities(self, tokens: np.ndarray, strength: float) -> np.ndarray:
        wanted = self._pair(tokens)
        index = np.searchsorted(self.pairs, wanted).clip(max=len(self.pairs) - 1)
        counts = np.where(self.pairs[index] == wanted, self.counts[index], 0)
        smooth = strength * self.unigram[tokens[1:]]
        return np.log(counts + smooth) - np.log(self.firsts[tokens[:-1]] + strength)


def _bits(
    bigram: _Bigram, tokens: np.ndarray, strength: float, token_bytes: np.ndarray
) -> tuple[float, int]:
    sizes = np.asarray(token_bytes)[tokens[1:]]
    logs = bigram.log_probabilities(tokens, strength)
    return float(-logs[sizes > 0].sum() / math.log(2)), int(sizes.sum())
