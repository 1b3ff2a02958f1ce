"""Byte-level BPE: training, loading, and how many bytes of text each token stands for."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meanbank.core.errors import one_line
from meanbank.data.encoder import plain

END_OF_TEXT = "<|endoftext|>"
# One name for the same role in each family of published tokenizers.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SAMPLE_BYTES = 8_000_000
SMALLEST_VOCABULARY = 257
HUB = "hf:"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE; equal texts give an equal tokenizer.

    The alphabet is all 256 bytes, so any text can be encoded and `decode` gives it back exactly.
    Id 0 is the end-of-text token. A small corpus may give fewer than `vocab_size` tokens.
    The time is a few seconds for the sample of `SAMPLE_BYTES` (8 MB of whole documents of the
    training split) that `prepare_corpus` passes; a larger sample hardly changes the merges.

    Raises ValueError when `vocab_size` cannot hold the bytes and the end-of-text token.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes and the end-of-text "
            f"token), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return plain(tokenizer)


def tokenizer_file(path: str | Path) -> Path:
    """The `tokenizer.json` that `path` (the file or its folder) names; ValueError if none."""
    path = Path(path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no tokenizer at {file}: name a tokenizer.json or a folder with one")
    return file


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a `tokenizer.json`, the one in a folder, or that of `hf:NAME` on the Hugging Face hub.

    The hub's is downloaded once and then found in the hub's cache. Truncation and padding stored
    in the file are switched off, and the literal text of a special token is encoded as plain text.
    Raises ValueError when there is no readable tokenizer.
    """
    if isinstance(path, str) and path.startswith(HUB):
        return plain(_hub_tokenizer(path.removeprefix(HUB)))
    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The Rust side raises plain Exception for every kind of malformed file.
    except Exception as error:
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
    return plain(tokenizer)


def _hub_tokenizer(name: str) -> Tokenizer:
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):  # no network needed
            return Tokenizer.from_file(cached)
        return Tokenizer.from_pretrained(name)
    # A name that is wrong or unknown, no network, a malformed file: all of unrelated classes.
    except Exception as error:
        raise ValueError(
            f"cannot get the tokenizer {name!r} from the Hugging Face hub (the first time needs "
            f"the network; a tokenizer.json of your own does not): {one_line(error)}"
        ) from error


def tokenizer_digest(path: str) -> str:
    """Hexadecimal digest of the tokenizer that `path` names, as `load_tokenizer` takes it."""
    if path.startswith(HUB):
        content = load_tokenizer(path).to_str().encode("utf-8")
    else:
        content = tokenizer_file(path).read_bytes()
    return hashlib.sha256(content).hexdigest()


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document; ValueError when the tokenizer has none."""
    for name in _END_OF_TEXT_NAMES:
        token_id = tokenizer.token_to_id(name)
        if token_id is not None:
            return token_id
    raise ValueError(
        f"the tokenizer has no end-of-text token: add one of {', '.join(_END_OF_TEXT_NAMES)}"
    )


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of UTF-8 text that each token id stands for, 0 for special tokens: (vocabulary,) int64.

    With a tokenizer that normalizes text (NFC, say) or adds a prefix space these are the bytes of
    the text as the tokenizer changed it.

    Raises ValueError when the tokenizer is not a byte-level BPE.
    """
    layout = json.loads(tokenizer.to_str())
    model, decoder = layout["model"]["type"], layout.get("decoder") or {}
    if model != "BPE" or not _has_byte_level(decoder):
        raise ValueError(
            "bytes per token are known for a byte-level BPE only, "
            f"this is a {model} with the decoder {decoder.get('type')}"
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    counts = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    for token, token_id in vocabulary.items():
        # The byte-level alphabet writes each byte as one character.
        counts[token_id] = len(token)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        counts[token_id] = 0 if added.special else len(added.content.encode("utf-8"))
    return counts


def _has_byte_level(part: dict[str, Any]) -> bool:
    return part.get("type") == "ByteLevel" or any(map(_has_byte_level, part.get("decoders", ())))
