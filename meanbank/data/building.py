"""A source becomes two packed splits in a folder; a build that was killed goes on where it was."""

import contextlib
import hashlib
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from meanbank.core.files import read_json, write_json, write_text
from meanbank.core.progress import progress
from meanbank.data.config import DataConfig
from meanbank.data.encoding import Piece, encode_pieces
from meanbank.data.readers import Document
from meanbank.data.sources import Source
from meanbank.data.split import Split, check_documents, survey, text_bytes
from meanbank.data.tokenizer import (
    SAMPLE_BYTES,
    end_of_text_id,
    load_tokenizer,
    token_bytes,
    train_tokenizer,
)
from meanbank.data.writer import SHARD_TOKENS, PackedWriter

SIDES = ("train", "held_out")
COMMIT_TOKENS = 2**24  # a killed build loses at most the work on so many tokens and a document
BYTES_PER_TOKEN = 4  # about, to know how much text a number of tokens is before there are tokens
# Hidden: they belong to the build, not to what is built.
_PLAN, _JOURNAL = ".plan.json", ".journal.json"


def capped_documents(source: Source, config: DataConfig) -> Iterator[Document]:
    """The documents that the caps of `config` leave, about, before they are encoded."""
    size = 0
    for document in itertools.islice(source.documents(), config.max_documents):
        yield document
        size += text_bytes(document.text)
        if config.max_tokens is not None and size >= BYTES_PER_TOKEN * config.max_tokens:
            return


def trained_tokenizer(sample: list[str], config: DataConfig) -> Tokenizer:
    """A tokenizer of `config.vocab_size` tokens, trained on a sample."""
    assert config.vocab_size is not None  # the settings fill it in where no tokenizer is named
    with progress(f"training a tokenizer of {config.vocab_size} tokens", 1) as report:
        tokenizer = train_tokenizer(sample, config.vocab_size)
        report(1)
    return tokenizer


def build_corpus(
    folder: Path, source: Source, config: DataConfig, named: Tokenizer | None, *, workers: int
) -> int:
    """Writes `tokenizer.json`, `corpus.json` and both splits into `folder`.

    Whatever an earlier call has left there, it ends with the same bytes. Returns the number of
    tokens that this call has encoded and kept.
    """
    split, size = _plan(folder, source, config, named)
    tokenizer = load_tokenizer(folder)
    encoded = 0
    while True:
        packing = Packing(folder, tokenizer, split, config)
        encoded += packing.run(source, size, workers=workers)
        check_documents(packing.documents, packing.counts.short_documents)
        settled = split.settled(packing.counts.lowest, packing.counts.highest)
        if settled == split:
            break
        split = settled  # one side was empty, which only reading everything tells
        (folder / _JOURNAL).unlink(missing_ok=True)
        _write_plan(folder, split, size)
    write_json(folder / "corpus.json", packing.close())
    return encoded


def _plan(
    folder: Path, source: Source, config: DataConfig, named: Tokenizer | None
) -> tuple[Split, int | None]:
    """The split to begin with and the bytes of text, if known; a tokenizer is in the folder."""
    split = Split(seed=config.split_seed, cut=config.held_out_fraction)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        plan = read_json(folder / _PLAN)
        return replace(split, cut=float(plan["cut"])), plan["bytes"]
    whole = config.max_documents is None and config.max_tokens is None
    size = source.bytes() if whole else None
    tokenizer = named
    if tokenizer is None:
        found = survey(lambda: capped_documents(source, config), split, SAMPLE_BYTES)
        split, size = found.split, found.bytes if whole else None
        tokenizer = trained_tokenizer(found.sample, config)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write_plan(folder, split, size)
    return split, size


def _write_plan(folder: Path, split: Split, size: int | None) -> None:
    write_json(folder / _PLAN, {"cut": split.cut, "bytes": size})


@dataclass
class Counts:
    """What was read so far. `read`: documents, those left out included. `bytes`: of text kept."""

    read: int = 0
    lowest: float = 1.0
    highest: float = 0.0
    short_documents: int = 0
    short_tokens: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))


class Packing:
    """Documents on their way into the two splits, with a journal of what is safe on disk."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, split: Split, config: DataConfig):
        self._folder, self._tokenizer, self._split, self._config = folder, tokenizer, split, config
        self.counts = Counts()
        self._writers = self._reopened() or self._opened(dict.fromkeys(SIDES))
        self._committed = self.tokens
        self._begin_document()

    def _reopened(self) -> dict[str, PackedWriter] | None:
        """Writers that go on from the journal; None where there is none that fits the files."""
        try:
            journal = read_json(self._folder / _JOURNAL)
            self.counts = Counts(**journal["counts"])
            return self._opened(journal["sides"])
        except (OSError, ValueError, KeyError, TypeError):
            self.counts = Counts()
            for side in SIDES:
                shutil.rmtree(self._folder / side, ignore_errors=True)
            return None

    def _opened(self, marks: dict[str, Any]) -> dict[str, PackedWriter]:
        return {
            side: PackedWriter(
                self._folder / side,
                vocab_size=len(token_bytes(self._tokenizer)),
                end_of_text_id=end_of_text_id(self._tokenizer),
                shard_tokens=SHARD_TOKENS,
                mark=marks[side],
            )
            for side in SIDES
        }

    @property
    def documents(self) -> int:
        """Documents kept."""
        return sum(writer.documents for writer in self._writers.values())

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return sum(writer.tokens for writer in self._writers.values())

    def run(self, source: Source, size: int | None, *, workers: int) -> int:
        """Encodes what is left of the source, as far as the caps allow; the tokens kept by it."""
        before = self.tokens
        if not self._is_full():
            documents = itertools.islice(source.documents(), self.counts.read, None)
            pieces = encode_pieces(documents, self._tokenizer, workers=workers)
            done = sum(self.counts.bytes.values())
            with (
                contextlib.closing(pieces),
                progress("encoding the corpus", size, done=done) as report,
            ):
                for piece, token_ids in pieces:
                    self._add(piece, token_ids)
                    report(text_bytes(piece.text), f"{self.tokens:,} tokens")
                    if piece.is_last and self._is_full():
                        break
        self._commit()
        return self.tokens - before

    def _is_full(self) -> bool:
        documents, tokens = self._config.max_documents, self._config.max_tokens
        return (documents is not None and self.documents >= documents) or (
            tokens is not None and self.tokens >= tokens
        )

    def _begin_document(self) -> None:
        self._waiting: list[np.ndarray] = []
        self._length = self._bytes = 0

    def _add(self, piece: Piece, token_ids: np.ndarray) -> None:
        draw = self._split.draw(piece.name)
        side = "held_out" if draw < self._split.cut else "train"
        # Tokens wait until they are enough to keep, so a long document is never held whole.
        self._waiting.append(token_ids)
        self._length += len(token_ids)
        self._bytes += text_bytes(piece.text)
        is_long = self._length + 1 >= (self._config.min_document_tokens or 0)
        if is_long:
            for part in self._waiting:
                self._writers[side].append(part)
            self._waiting = []
        if not piece.is_last:
            return
        self.counts.read += 1
        if is_long:
            self._writers[side].end_document()
            self.counts.lowest = min(self.counts.lowest, draw)
            self.counts.highest = max(self.counts.highest, draw)
            self.counts.bytes[side] += self._bytes
        else:
            self.counts.short_documents += 1
            self.counts.short_tokens += self._length + 1
        self._begin_document()
        if self.tokens - self._committed >= COMMIT_TOKENS:
            self._commit()

    def _commit(self) -> None:
        sides = {side: writer.mark() for side, writer in self._writers.items()}
        write_json(self._folder / _JOURNAL, {"counts": asdict(self.counts), "sides": sides})
        self._committed = self.tokens

    def close(self) -> dict[str, Any]:
        """Ends both splits; what to write beside them: JSON values."""
        for writer in self._writers.values():
            writer.close()
        writers, counts = self._writers, self.counts
        text = self._tokenizer.to_str()
        built: dict[str, Any] = {
            "vocab_size": len(token_bytes(self._tokenizer)),
            "tokenizer_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
            "documents": {side: writers[side].documents for side in SIDES},
            "tokens": {side: writers[side].tokens for side in SIDES},
            "bytes": counts.bytes,
        }
        if self._config.min_document_tokens is not None:
            dropped = {"documents": counts.short_documents, "tokens": counts.short_tokens}
            built["shorter_documents"] = dropped
        return built
