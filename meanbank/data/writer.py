"""Writing packed tokens: files that only grow, so that a killed build can go on."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meanbank.core.files import write_json
from meanbank.data.packed import HEADER, OFFSETS, TOKENS

SHARD_TOKENS = 2**27
_BLOCK = 2**20  # bytes read at a time


class GrowingFile:
    """A file that is only appended to, and the digest of what it holds.

    mark: what an earlier `mark` gave. The file is then cut to the size that it had, and goes on.
    Raises ValueError where it does not hold what it held.
    """

    def __init__(self, path: Path, mark: dict[str, Any] | None = None):
        self._digest = hashlib.sha256()
        self.size = 0
        self._file = path.open("wb" if mark is None else "r+b")
        if mark is not None:
            self._read_again(mark)

    def _read_again(self, mark: dict[str, Any]) -> None:
        while block := self._file.read(min(_BLOCK, mark["bytes"] - self.size)):
            self._digest.update(block)
            self.size += len(block)
        if self._mark() != mark:
            self._file.close()
            raise ValueError(f"{self._file.name} does not hold what was written to it")
        self._file.truncate(self.size)
        self._file.seek(self.size)

    def append(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    def mark(self) -> dict[str, Any]:
        """What it holds, all of it on disk now: JSON values."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._mark()

    def _mark(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self.mark()
        self._file.close()


class PackedWriter:
    """Writes documents piece by piece into a folder, in shards of `shard_tokens` tokens.

    `vocab_size` decides the width of a token: uint16 while every id fits, else uint32. `mark`: of
    an earlier writer in this folder, which this one goes on from; ValueError where the files have
    changed since.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_of_text_id: int,
        shard_tokens: int = SHARD_TOKENS,
        mark: dict[str, Any] | None = None,
    ):
        self._folder = folder
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._end, self._vocabulary = end_of_text_id, vocab_size
        self._shard_bytes = shard_tokens * self._dtype.itemsize
        folder.mkdir(exist_ok=True)
        if mark is None:
            mark = {"documents": 0, "tokens": 0, "offsets": None, "shards": []}
        self.documents, self.tokens = mark["documents"], mark["tokens"]
        self._ended = self.tokens
        self._offsets = GrowingFile(folder / OFFSETS, mark["offsets"])
        self._shards: list[GrowingFile] = []
        for shard in mark["shards"]:
            self._next_shard(shard)
        if mark["offsets"] is None:
            self._offsets.append(np.int64(0).tobytes())

    def append(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Adds tokens to the current document; ValueError for ids outside the vocabulary."""
        ids = np.asarray(token_ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise ValueError(f"token ids must be from 0 to {self._vocabulary - 1}")
        data = memoryview(np.ascontiguousarray(ids, dtype=self._dtype).tobytes())
        self.tokens += len(token_ids)
        while data:
            if not self._shards or self._shards[-1].size == self._shard_bytes:
                self._next_shard(None)
            room = self._shard_bytes - self._shards[-1].size
            self._shards[-1].append(bytes(data[:room]))
            data = data[room:]

    def end_document(self) -> None:
        """Adds the end-of-text token and starts the next document."""
        self.append([self._end])
        self._offsets.append(np.int64(self.tokens).tobytes())
        self.documents, self._ended = self.documents + 1, self.tokens

    def mark(self) -> dict[str, Any]:
        """What is written, all of it on disk now: JSON values. Call it between documents."""
        assert self._ended == self.tokens, "a document was not ended"
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "offsets": self._offsets.mark(),
            "shards": [shard.mark() for shard in self._shards],
        }

    def close(self) -> None:
        """Writes the header. The current document must be ended."""
        self.mark()
        for file in (self._offsets, *self._shards):
            file.close()
        number = len(self._shards)
        while (begun := self._folder / TOKENS.format(number)).exists():  # by a killed writer
            begun.unlink()
            number += 1
        header = {
            "dtype": self._dtype.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": len(self._shards),
        }
        write_json(self._folder / HEADER, header)

    def _next_shard(self, mark: dict[str, Any] | None) -> None:
        if self._shards:
            self._shards[-1].close()
        path = self._folder / TOKENS.format(len(self._shards))
        self._shards.append(GrowingFile(path, mark))
