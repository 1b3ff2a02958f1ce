"""Documents as one memory-mapped stream of tokens with their boundaries, in shards."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TOKENS, OFFSETS, HEADER = "tokens-{:05}.bin", "offsets.bin", "packed.json"


class ShardedTokens:
    """Arrays of tokens one after the other, read as one: (N,), nothing is copied until asked for.

    It is indexed with a number, a slice or an array of positions, as a NumPy array is, and
    `np.asarray` reads it all.
    """

    def __init__(self, shards: Sequence[np.ndarray]):
        self.shards = tuple(shards)
        self.dtype = np.result_type(*self.shards)
        self._ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            key = np.arange(start, stop, step)
        positions = np.asarray(key)
        if positions.size and not -len(self) <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"positions must lie in {len(self)} tokens")
        return self._at(np.where(positions < 0, positions + len(self), positions))[()]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("sharded tokens become one array by a copy only")
        return np.concatenate(self.shards, dtype=dtype or self.dtype)

    def _range(self, start: int, stop: int) -> np.ndarray:
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        parts = []
        for shard, end in zip(self.shards[first : last + 1], self._ends[first:], strict=False):
            before = int(end) - len(shard)
            parts.append(shard[max(start - before, 0) : stop - before])
        if not parts:
            return np.empty(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _at(self, positions: np.ndarray) -> np.ndarray:
        found = np.empty(positions.shape, self.dtype)
        number = np.searchsorted(self._ends, positions, side="right")
        for index in np.unique(number):
            here, shard = number == index, self.shards[index]
            found[here] = shard[positions[here] - (self._ends[index] - len(shard))]
        return found


Tokens = np.ndarray | ShardedTokens


class PackedTokens:
    """Documents one after the other, each followed by one end-of-text token.

    `tokens`: (N,) uint16 or uint32, memory-mapped and read-only; several files are read as one.
    `offsets`: (documents + 1,) int64; document i is `tokens[offsets[i] : offsets[i + 1]]`, its
    end-of-text token included.
    """

    def __init__(self, *, tokens: Tokens, offsets: np.ndarray):
        self.tokens = tokens
        self.offsets = offsets

    @classmethod
    def open(cls, folder: str | Path) -> "PackedTokens":
        """Maps what `PackedWriter` left in `folder`.

        Raises ValueError when files are missing or do not fit together.
        """
        folder = Path(folder)
        try:
            header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
            dtype, shards = np.dtype(header["dtype"]), int(header["shards"])
            maps = [np.memmap(folder / TOKENS.format(i), dtype, mode="r") for i in range(shards)]
            offsets = np.asarray(np.memmap(folder / OFFSETS, np.int64, mode="r"))
            tokens = maps[0] if shards == 1 else ShardedTokens(maps)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds no packed tokens: {error}") from error
        documents, total = header["documents"], header["tokens"]
        if (len(tokens), len(offsets), offsets[-1]) != (total, documents + 1, total):
            raise ValueError(f"the packed tokens in {folder} are incomplete")
        return cls(tokens=tokens, offsets=offsets)

    @classmethod
    def joined(cls, parts: Sequence["PackedTokens"]) -> "PackedTokens":
        """The documents of all parts, one part after the other; no token is copied."""
        if len(parts) == 1:
            return parts[0]
        shards: list[np.ndarray] = []
        offsets, before = [np.zeros(1, np.int64)], 0
        for part in parts:
            tokens = part.tokens
            shards += tokens.shards if isinstance(tokens, ShardedTokens) else [tokens]
            offsets.append(part.offsets[1:] + before)
            before += len(tokens)
        return cls(tokens=ShardedTokens(shards), offsets=np.concatenate(offsets))

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document with its end-of-text token: (documents,) int64."""
        return np.diff(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document that end with its end-of-text token; a view within a shard."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def documents_at_least(self, tokens: int) -> np.ndarray:
        """Indices of the documents with at least this many tokens, in order: int64."""
        return np.flatnonzero(self.lengths >= tokens)
