"""Documents as one memory-mapped stream of tokens with their boundaries."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_TOKENS, _OFFSETS, _HEADER = "tokens.bin", "offsets.npy", "packed.json"


class PackedTokens:
    """Documents one after the other, each followed by one end-of-text token.

    `tokens`: (N,) uint16 or uint32, memory-mapped and read-only. `offsets`: (documents + 1,)
    int64; document i is `tokens[offsets[i] : offsets[i + 1]]`, its end-of-text token included.
    """

    def __init__(self, *, tokens: np.ndarray, offsets: np.ndarray):
        self.tokens = tokens
        self.offsets = offsets

    @classmethod
    def open(cls, folder: str | Path) -> "PackedTokens":
        """Maps what `PackedWriter` left in `folder`.

        Raises ValueError when files are missing or do not fit together.
        """
        folder = Path(folder)
        try:
            header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
            offsets = np.load(folder / _OFFSETS)
            tokens = np.memmap(folder / _TOKENS, dtype=header["dtype"], mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds no packed tokens: {error}") from error
        if len(tokens) != header["tokens"] or offsets[-1] != len(tokens):
            raise ValueError(f"the packed tokens in {folder} are incomplete")
        return cls(tokens=tokens, offsets=offsets)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document with its end-of-text token: (documents,) int64."""
        return np.diff(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, a view that ends with its end-of-text token."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def documents_at_least(self, tokens: int) -> np.ndarray:
        """Indices of the documents with at least this many tokens, in order: int64."""
        return np.flatnonzero(self.lengths >= tokens)


class PackedWriter:
    """Writes documents piece by piece into an existing, empty folder.

    `vocab_size` decides the width of a token: uint16 while every id fits, else uint32.
    """

    def __init__(self, folder: Path, *, vocab_size: int, end_of_text_id: int):
        self._folder = folder
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._end = end_of_text_id
        self._offsets = [0]
        self._written = 0
        self._file = (folder / _TOKENS).open("wb")

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the current document."""
        self._file.write(np.asarray(token_ids, dtype=self._dtype).tobytes())
        self._written += len(token_ids)

    def end_document(self) -> None:
        """Adds the end-of-text token and starts the next document."""
        self.append([self._end])
        self._offsets.append(self._written)

    def close(self) -> None:
        """Writes the boundaries. The current document must be ended."""
        assert self._offsets[-1] == self._written, "a document was not ended"
        self._file.close()
        np.save(self._folder / _OFFSETS, np.asarray(self._offsets, dtype=np.int64))
        header = {"dtype": self._dtype.name, "tokens": self._written}
        (self._folder / _HEADER).write_text(json.dumps(header), encoding="utf-8")
