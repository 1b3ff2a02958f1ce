"""Where the rows of training batches lie in packed tokens: a pure function of seed and number."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from meanbank.data.packed import PackedTokens

Pack = Literal["stream", "isolate", "document"]


class Windows:
    """Windows of `length` + 1 tokens of one source, epoch after epoch in a random order.

    Windows have numbers from 0 on; each epoch has `per_epoch` of them. Where they lie and in which
    order depends on `seed`, the epoch and the source's `number` only.
    """

    per_epoch: int

    def __init__(self, packed: PackedTokens, *, length: int, seed: int, number: int = 0):
        self.packed = packed
        self.length = length
        self._key = seed, number
        self._epoch = -1, np.empty(0, dtype=np.int64)

    def starts(self, windows: np.ndarray) -> np.ndarray:
        """First positions of windows by their numbers: (n,) int64."""
        places = [divmod(window, self.per_epoch) for window in windows.tolist()]
        return np.array([self._starts(epoch)[place] for epoch, place in places], dtype=np.int64)

    def tokens(self, windows: np.ndarray) -> np.ndarray:
        """Tokens of windows by their numbers: (n, length + 1) int64."""
        positions = self.starts(windows)[:, None] + np.arange(self.length + 1)
        tokens = self.packed.tokens
        return tokens[positions % len(tokens)].astype(np.int64)

    def _starts(self, epoch: int) -> np.ndarray:
        # Only a cache: the permutation of one epoch, made again after a jump. Number and starts are
        # one value, for threads ask here at the same time.
        cached, starts = self._epoch
        if epoch != cached:
            seed, number = self._key
            # For source 0 these are the numbers of (seed, epoch): NumPy fills up with zeros.
            starts = self._shuffled(np.random.default_rng((seed, epoch, number)))
            self._epoch = epoch, starts
        return starts

    def _shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """Starts of all windows of an epoch, in its order."""
        raise NotImplementedError


class RingWindows(Windows):
    """Windows of the stream of documents, read as a ring: the first follows the last.

    An epoch cuts it at a random offset into windows whose inputs do not overlap (less than one
    window is left out).
    Raises ValueError when the stream has fewer than `length` + 1 tokens.
    """

    def __init__(self, packed: PackedTokens, **settings: Any):
        super().__init__(packed, **settings)
        if len(packed.tokens) < self.length + 1:
            raise ValueError(
                f"the split has {len(packed.tokens)} tokens, a window needs {self.length + 1}: "
                "use more text or a smaller data.sequence_length"
            )
        self.per_epoch = len(packed.tokens) // self.length

    def _shuffled(self, generator: np.random.Generator) -> np.ndarray:
        offset = generator.integers(len(self.packed.tokens))
        order = generator.permutation(self.per_epoch)
        return (offset + order * self.length) % len(self.packed.tokens)


class DocumentWindows(Windows):
    """Windows of single documents: none crosses from one into the next.

    An epoch cuts every document, from a random offset on, into as many windows as it has room for,
    whose inputs do not overlap.
    Raises ValueError when no document has `length` + 1 tokens.
    """

    def __init__(self, packed: PackedTokens, **settings: Any):
        super().__init__(packed, **settings)
        self._documents = packed.documents_at_least(self.length + 1)
        if not len(self._documents):
            raise ValueError(
                f"no document has the {self.length + 1} tokens that a row needs, the longest has "
                f"{packed.lengths.max()}: use longer documents or a smaller data.sequence_length"
            )
        self._rows, self._spare = divmod(packed.lengths[self._documents] - 1, self.length)
        self.per_epoch = int(self._rows.sum())

    def _shuffled(self, generator: np.random.Generator) -> np.ndarray:
        first = self.packed.offsets[self._documents] + generator.integers(self._spare + 1)
        before = np.cumsum(self._rows) - self._rows  # windows of the documents before
        inside = np.arange(self.per_epoch) - np.repeat(before, self._rows)
        starts = np.repeat(first, self._rows) + inside * self.length
        return starts[generator.permutation(self.per_epoch)]


WINDOWS: dict[Pack, type[Windows]] = {
    "stream": RingWindows,
    "isolate": RingWindows,
    "document": DocumentWindows,
}
assert tuple(WINDOWS) == get_args(Pack)


def left_out(packed: PackedTokens, length: int) -> dict[str, int]:
    """What `DocumentWindows` leave out of an epoch.

    documents: without a row. tokens: that are the input of no row, an end-of-text token, which
    never is one, aside.
    """
    text = packed.lengths - 1
    return {
        "documents": int((text < length).sum()),
        "tokens": int((text % length).sum()),
    }


class Turns:
    """Which of several sources each window comes from, in exact proportions.

    Windows go by cycles of sum(counts), in which source i has `counts[i]` turns, in a random order
    that depends on the seed and the cycle.
    """

    def __init__(self, counts: Sequence[int], seed: int):
        self.counts = np.asarray(counts, dtype=np.int64)
        self._seed = seed
        none = np.empty(0, dtype=np.int64)
        self._cycle = -1, none, none

    def __call__(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For windows by their numbers: the source and the window's number in it, (n,) int64."""
        sources, numbers = np.empty_like(windows), np.empty_like(windows)
        cycles, places = np.divmod(windows, self.counts.sum())
        for cycle in np.unique(cycles):
            here = cycles == cycle
            turns, ranks = self._turns(int(cycle))
            sources[here] = turns[places[here]]
            numbers[here] = cycle * self.counts[sources[here]] + ranks[places[here]]
        return sources, numbers

    def _turns(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a cycle: the source of each turn, and which of that source's it is."""
        cached, sources, ranks = self._cycle  # one value, as in `Windows._starts`
        if cycle != cached:
            each = np.arange(len(self.counts))
            # a number that no source has: its draws are not those of a source's epochs
            generator = np.random.default_rng((self._seed, cycle, len(self.counts)))
            sources = generator.permutation(np.repeat(each, self.counts))
            ranks = np.empty_like(sources)
            for source in each:
                ranks[sources == source] = np.arange(self.counts[source])
            self._cycle = cycle, sources, ranks
        return sources, ranks
