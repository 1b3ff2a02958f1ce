"""From a source to two packed splits and a tokenizer, built once into the cache."""

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from meanbank.core.progress import progress
from meanbank.data.cache import build_once, cache_root
from meanbank.data.config import DataConfig
from meanbank.data.packed import PackedTokens, PackedWriter
from meanbank.data.sources import RECALL, Document, Source, open_source
from meanbank.data.tokenizer import (
    SAMPLE_BYTES,
    encode_texts,
    end_of_text_id,
    load_tokenizer,
    token_bytes,
    tokenizer_digest,
    train_tokenizer,
)

# Raise it whenever the same settings would give other files.
_FORMAT = 1
_PIECE_CHARACTERS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared source.

    `token_bytes`: (vocabulary,) int64, see `meanbank.data.token_bytes`. `fingerprint`: of
    the source, the tokenizer's settings and the split. `description`: JSON values to write
    beside every result.
    """

    train: PackedTokens
    held_out: PackedTokens
    tokenizer: Tokenizer
    token_bytes: np.ndarray
    end_of_text_id: int
    fingerprint: str
    description: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the largest id + 1."""
        return len(self.token_bytes)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which documents are held out: those whose draw, a hash of seed and name, is below `cut`.

    So a document keeps its side whatever the order and whatever is added to the corpus.
    """

    seed: int
    cut: float

    def draw(self, name: str) -> float:
        """A number in [0, 1) that depends on the seed and the document's name only."""
        return _draw(f"split:{self.seed}:{name}")

    def is_held_out(self, name: str) -> bool:
        """The side of a document."""
        return self.draw(name) < self.cut


def prepare_corpus(config: DataConfig) -> Corpus:
    """Opens the prepared corpus of `config`, after building it in the cache if need be.

    The folder is `MEANBANK_CACHE` (or `~/.cache/meanbank`) / `corpora` / fingerprint.
    Documents are split by a hash of seed and name. The tokenizer, unless one is named, is trained
    on 8 MB of whole documents of the training split, chosen by hash as well.

    Raises ValueError for an unknown, unreadable or empty source, for fewer than two documents, and
    for a tokenizer that is missing, not a byte-level BPE or not of `vocab_size`; ImportError for a
    missing extra.
    """
    if config.source == RECALL:
        raise ValueError("the source 'recall' has no corpus to prepare: use RecallBatches")
    named = _named_tokenizer(config)  # before a source is opened, which may be large
    source = open_source(config.source)
    fingerprint = _fingerprint(source, config)
    folder = cache_root() / "corpora" / fingerprint[:32]
    build_once(folder, lambda aside: _build(aside, source, config, named))
    tokenizer = load_tokenizer(folder)
    built = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return Corpus(
        train=PackedTokens.open(folder / "train"),
        held_out=PackedTokens.open(folder / "held_out"),
        tokenizer=tokenizer,
        token_bytes=token_bytes(tokenizer),
        end_of_text_id=end_of_text_id(tokenizer),
        fingerprint=fingerprint,
        # Not from the cache: equal text may lie elsewhere now.
        description={**source.describe(), **_describe(config), "fingerprint": fingerprint, **built},
    )


def choose_split(source: Source, *, seed: int, held_out_fraction: float) -> tuple[Split, int]:
    """The split of a source, with at least one document on each side, and the source's bytes.

    When chance leaves a side empty it gets the document whose draw is nearest.
    Raises ValueError when the source has fewer than two documents.
    """
    split = Split(seed=seed, cut=held_out_fraction)
    lowest, highest, documents, size = 1.0, 0.0, 0, 0
    for document in source.documents():
        draw = split.draw(document.name)
        lowest, highest = min(lowest, draw), max(highest, draw)
        documents += 1
        size += len(document.text.encode("utf-8"))
    if documents < 2:
        raise ValueError(
            f"the source has {documents} documents with text, a split needs at least 2: add files, "
            "or cut the text into several documents"
        )
    if lowest >= split.cut:
        return Split(seed=seed, cut=float(np.nextafter(lowest, 1))), size
    return Split(seed=seed, cut=min(split.cut, highest)), size


def _fingerprint(source: Source, config: DataConfig) -> str:
    if config.tokenizer is None:
        tokenizer = f"bpe:{config.vocab_size}:{SAMPLE_BYTES}"
    else:
        tokenizer = tokenizer_digest(config.tokenizer)
    settings = {
        "format": _FORMAT,
        "source": source.fingerprint(),
        "tokenizer": tokenizer,
        "held_out_fraction": config.held_out_fraction,
        "split_seed": config.split_seed,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8")).hexdigest()


def _describe(config: DataConfig) -> dict[str, Any]:
    return {
        "tokenizer": config.tokenizer or "byte-level BPE, trained on the training split",
        "held_out_fraction": config.held_out_fraction,
        "split_seed": config.split_seed,
    }


def _named_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that the settings name, if they do; refuses an unsuitable one."""
    if config.tokenizer is None:
        return None
    tokenizer = load_tokenizer(config.tokenizer)
    tokens = len(token_bytes(tokenizer))
    end_of_text_id(tokenizer)
    if config.vocab_size not in (None, tokens):
        raise ValueError(
            f"data.vocab_size is {config.vocab_size}, but the tokenizer {config.tokenizer} has "
            f"{tokens} tokens"
        )
    return tokenizer


def _build(folder: Path, source: Source, config: DataConfig, named: Tokenizer | None) -> None:
    split, size = choose_split(
        source, seed=config.split_seed, held_out_fraction=config.held_out_fraction
    )
    tokenizer = _trained_tokenizer(source, split, config) if named is None else named
    tokenizer.save(str(folder / "tokenizer.json"))
    packed = _pack(folder, source, split, tokenizer, size)
    built = {
        "vocab_size": len(token_bytes(tokenizer)),
        "tokenizer_sha256": hashlib.sha256(tokenizer.to_str().encode("utf-8")).hexdigest(),
        "documents": {side: len(tokens) for side, tokens in packed.items()},
        "tokens": {side: len(tokens.tokens) for side, tokens in packed.items()},
    }
    (folder / "corpus.json").write_text(json.dumps(built, indent=1), encoding="utf-8")


def _trained_tokenizer(source: Source, split: Split, config: DataConfig) -> Tokenizer:
    assert config.vocab_size is not None  # the settings fill it in where no tokenizer is named
    with progress(f"training a tokenizer of {config.vocab_size} tokens", 1) as report:
        tokenizer = train_tokenizer(_sample(source, split, SAMPLE_BYTES), config.vocab_size)
        report(1)
    return tokenizer


def _sample(source: Source, split: Split, size: int) -> list[str]:
    """Whole training documents of about `size` bytes in all, at least one, in hashed order."""
    heap: list[tuple[float, str, str]] = []
    total = 0
    for document in _training_documents(source, split):
        heapq.heappush(heap, (-_draw(f"sample:{document.name}"), document.name, document.text))
        total += len(document.text.encode("utf-8"))
        # Drop the documents of the highest draw while the others are enough.
        while total - (largest := len(heap[0][2].encode("utf-8"))) >= size:
            heapq.heappop(heap)
            total -= largest
    return [text for _, _, text in sorted(heap, reverse=True)]


def _training_documents(source: Source, split: Split) -> Iterator[Document]:
    return (document for document in source.documents() if not split.is_held_out(document.name))


def _pack(
    folder: Path, source: Source, split: Split, tokenizer: Tokenizer, size: int
) -> dict[str, PackedTokens]:
    """Encodes every document into `folder/train` or `folder/held_out`."""
    writers = {}
    for side in ("train", "held_out"):
        (folder / side).mkdir()
        writers[side] = PackedWriter(
            folder / side,
            vocab_size=len(token_bytes(tokenizer)),
            end_of_text_id=end_of_text_id(tokenizer),
        )
    with progress("encoding the corpus", size) as report:
        for pieces in _batches_of_pieces(source, split):
            encoded = encode_texts(tokenizer, [text for _, text, _ in pieces])
            for (side, text, is_last), token_ids in zip(pieces, encoded, strict=True):
                writers[side].append(token_ids)
                if is_last:
                    writers[side].end_document()
                report(len(text.encode("utf-8")))
    for writer in writers.values():
        writer.close()
    return {side: PackedTokens.open(folder / side) for side in writers}


def _batches_of_pieces(source: Source, split: Split) -> Iterator[list[tuple[str, str, bool]]]:
    """Lists of (side, text, is the document's last piece), about a million characters a list."""
    pieces: list[tuple[str, str, bool]] = []
    characters = 0
    for document in source.documents():
        side = "held_out" if split.is_held_out(document.name) else "train"
        texts = cut_text(document.text, _PIECE_CHARACTERS)
        for number, text in enumerate(texts, start=1):
            pieces.append((side, text, number == len(texts)))
            characters += len(text)
            if characters >= _PIECE_CHARACTERS:
                yield pieces
                pieces, characters = [], 0
    if pieces:
        yield pieces


def cut_text(text: str, size: int) -> list[str]:
    """Cuts a text into pieces of at most `size` characters, so that encoding needs little memory.

    A cut comes before a single space between visible characters, where the usual byte-level
    tokenizers start a new word anyway: the tokens stay those of the whole text. Without such a
    place in the second half of a piece the cut is anywhere, which still decodes to the same text.
    """
    pieces, start = [], 0
    while len(text) - start > size:
        end = start + size
        first = start + max(size // 2, 1)
        place = text.rfind(" ", first, end)
        while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
            place = text.rfind(" ", first, place)
        end = place if place > 0 else end
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces


def _draw(key: str) -> float:
    """A uniform number in [0, 1) from a hash of `key`."""
    # 53 bits: what a float holds, so the number stays below 1.
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
