"""From sources to packed splits and a tokenizer, built once into the cache."""

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from meanbank.core.files import read_json
from meanbank.data.building import SIDES, build_corpus, capped_documents, trained_tokenizer
from meanbank.data.cache import build_once, cache_root
from meanbank.data.config import DataConfig
from meanbank.data.encoding import chosen_workers
from meanbank.data.packed import PackedTokens
from meanbank.data.sources import RECALL, Source, open_source
from meanbank.data.split import Split, survey
from meanbank.data.tokenizer import (
    SAMPLE_BYTES,
    end_of_text_id,
    load_tokenizer,
    token_bytes,
    tokenizer_digest,
)
from meanbank.data.windows import left_out

# Of the content: raise it whenever the same settings would give other tokens.
_FORMAT = 1
# Of the files: raise it whenever the same tokens would lie in other files.
_LAYOUT = 2


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a corpus.

    `name`: as in the settings. `turns`: how many windows of a cycle come from it. `folder`: where
    it lies. `encoded`: tokens that preparing it has encoded just now; 0 where it lay there.
    """

    name: str
    turns: int
    train: PackedTokens
    held_out: PackedTokens
    fingerprint: str
    description: dict[str, Any]
    folder: Path
    encoded: int


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared source, or several.

    `train`, `held_out`: of all sources, one after the other; `parts` has each by itself.
    `token_bytes`: (vocabulary,) int64, see `meanbank.data.token_bytes`. `fingerprint`: of the
    sources, the tokenizer's settings and the split. `description`: JSON values to write beside
    every result; what settings leave out of the sources is counted there.
    """

    train: PackedTokens
    held_out: PackedTokens
    tokenizer: Tokenizer
    token_bytes: np.ndarray
    end_of_text_id: int
    fingerprint: str
    description: dict[str, Any]
    parts: tuple[Part, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the largest id + 1."""
        return len(self.token_bytes)

    def only(self, part: Part) -> "Corpus":
        """The corpus of one of its parts, with the same tokenizer."""
        return dataclasses.replace(
            self,
            train=part.train,
            held_out=part.held_out,
            fingerprint=part.fingerprint,
            description=part.description,
            parts=(part,),
        )


def prepare_corpus(config: DataConfig, *, workers: int | None = None) -> Corpus:
    """Opens the prepared corpus of `config`, after building it in the cache if need be.

    Each source lies in `MEANBANK_CACHE` (or `~/.cache/meanbank`) / `corpora`, under its
    fingerprint. Documents are split by a hash of seed and name. The tokenizer, unless one is named,
    is trained on 8 MB of whole documents of the training splits, chosen by hash as well. `workers`:
    processes that encode, by default `MEANBANK_WORKERS` or this one only; the result is the same.
    An interrupted build goes on where it was.

    Raises ValueError for an unknown, unreadable or empty source, for fewer than two documents, and
    for a tokenizer that is missing, not a byte-level BPE or not of `vocab_size`; ImportError for a
    missing extra.
    """
    if config.source == RECALL:
        raise ValueError("the source 'recall' has no corpus to prepare: use RecallBatches")
    workers = chosen_workers(workers)
    named = _named_tokenizer(config)  # before a source is opened, which may be large
    sources = [open_source(share.source) for share in config.sources]
    if len(sources) > 1 and named is None:
        path = _common_tokenizer(sources, config)
        config = dataclasses.replace(config, tokenizer=str(path), vocab_size=None)
        trained, named = True, load_tokenizer(path)
    else:
        trained = config.tokenizer is None
    parts = tuple(
        _prepare_part(share.source, turns, source, config, named, workers)
        for share, turns, source in zip(config.sources, config.turns(), sources, strict=True)
    )
    told = "byte-level BPE, trained on the training split" if trained else str(config.tokenizer)
    tokenizer = load_tokenizer(parts[0].folder)
    fingerprint = _joint_fingerprint(parts)
    train = PackedTokens.joined([part.train for part in parts])
    description = _describe(parts, config, told)
    if config.pack == "document":
        each = [left_out(part.train, config.sequence_length) for part in parts]
        description["left_out_of_rows"] = {k: sum(e[k] for e in each) for k in each[0]}
    _tell_left_out(description)
    return Corpus(
        train=train,
        held_out=PackedTokens.joined([part.held_out for part in parts]),
        tokenizer=tokenizer,
        token_bytes=token_bytes(tokenizer),
        end_of_text_id=end_of_text_id(tokenizer),
        fingerprint=fingerprint,
        description={**description, "fingerprint": fingerprint},
        parts=parts,
    )


def _prepare_part(
    name: str,
    turns: int,
    source: Source,
    config: DataConfig,
    named: Tokenizer | None,
    workers: int,
) -> Part:
    fingerprint = _fingerprint(source, config)
    folder = cache_root() / "corpora" / f"{fingerprint[:32]}-{_LAYOUT}"
    encoded = 0

    def build(aside: Path) -> None:
        nonlocal encoded
        encoded = build_corpus(aside, source, config, named, workers=workers)

    build_once(folder, build)
    built = read_json(folder / "corpus.json")
    return Part(
        name=name,
        turns=turns,
        train=PackedTokens.open(folder / "train"),
        held_out=PackedTokens.open(folder / "held_out"),
        fingerprint=fingerprint,
        # Not from the cache: equal text may lie elsewhere now.
        description={**source.describe(), **built},
        folder=folder,
        encoded=encoded,
    )


def _caps(config: DataConfig) -> dict[str, int]:
    """What leaves out a part of a source, where it is set."""
    names = ("min_document_tokens", "max_documents", "max_tokens")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _fingerprint(source: Source, config: DataConfig) -> str:
    named = config.tokenizer
    tokenizer = _bpe(config) if named is None else tokenizer_digest(named)
    return _digest(
        {
            "format": _FORMAT,
            "source": source.fingerprint(),
            "tokenizer": tokenizer,
            "held_out_fraction": config.held_out_fraction,
            "split_seed": config.split_seed,
            **_caps(config),
        }
    )


def _joint_fingerprint(parts: tuple[Part, ...]) -> str:
    if len(parts) == 1:
        return parts[0].fingerprint
    return _digest({"format": _FORMAT, "parts": [[p.fingerprint, p.turns] for p in parts]})


def _bpe(config: DataConfig) -> str:
    return f"bpe:{config.vocab_size}:{SAMPLE_BYTES}"


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8")).hexdigest()


def _describe(parts: tuple[Part, ...], config: DataConfig, tokenizer: str) -> dict[str, Any]:
    settings = {
        "tokenizer": tokenizer,
        "held_out_fraction": config.held_out_fraction,
        "split_seed": config.split_seed,
        **_caps(config),
    }
    first = parts[0].description
    if len(parts) == 1:
        return {**first, **settings}
    described = [
        {"weight": share.weight, **part.description}
        for share, part in zip(config.sources, parts, strict=True)
    ]
    told: dict[str, Any] = {"source": described, **settings}
    told |= {name: first[name] for name in ("vocab_size", "tokenizer_sha256")}
    for name in ("documents", "tokens", "bytes"):
        told[name] = {side: sum(p.description[name][side] for p in parts) for side in SIDES}
    if (key := "shorter_documents") in first:
        told[key] = {k: sum(p.description[key][k] for p in parts) for k in first[key]}
    return told


def _tell_left_out(description: dict[str, Any]) -> None:
    """A line on stderr for what the settings leave out, of what was read."""
    reasons = {
        "shorter_documents": "shorter than data.min_document_tokens, left out of both splits",
        "left_out_of_rows": "in no row of an epoch (data.pack: document)",
    }
    for name, reason in reasons.items():
        if any((found := description.get(name, {})).values()):
            documents, tokens = found["documents"], found["tokens"]
            line = f"{reason}: {documents:,} documents, {tokens:,} tokens in all"
            print(line, file=sys.stderr, flush=True)


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


def _common_tokenizer(sources: list[Source], config: DataConfig) -> Path:
    """The folder of a tokenizer trained on the training splits of all sources, by their weights."""
    turns = config.turns()
    fingerprint = _digest(
        {
            "format": _FORMAT,
            "sources": [[s.fingerprint(), t] for s, t in zip(sources, turns, strict=True)],
            "tokenizer": _bpe(config),
            "held_out_fraction": config.held_out_fraction,
            "split_seed": config.split_seed,
            **_caps(config),
        }
    )
    folder = cache_root() / "tokenizers" / fingerprint[:32]

    def build(aside: Path) -> None:
        split = Split(seed=config.split_seed, cut=config.held_out_fraction)
        sample = []
        for source, count in zip(sources, turns, strict=True):
            share = max(1, SAMPLE_BYTES * count // sum(turns))
            sample += survey(lambda s=source: capped_documents(s, config), split, share).sample
        trained_tokenizer(sample, config).save(str(aside / "tokenizer.json"))

    build_once(folder, build)
    return folder
