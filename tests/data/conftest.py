"""A small corpus of words, and a cache of its own for every test."""

import os
import random
from pathlib import Path

import huggingface_hub.constants
import pytest

from meanbank.data.tokenizer import train_tokenizer

WORDS = ["the", "memory", "keeps", "a", "mean", "of", "keys", "and", "naïve", "東京", "🙂"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEANBANK_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, and what a process wrote stays without it when only the process is killed."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """Forty text files of different lengths."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    generator = random.Random(0)
    for number in range(40):
        words = generator.choices(WORDS, k=20 + 10 * number)
        (folder / f"{number:02}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hugging Face hub that holds the tokenizer `some/one`, of 260 tokens."""
    folder = tmp_path / "hub"
    snapshot = folder / "models--some--one" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    train_tokenizer(["some other text"], 260).save(str(snapshot / "tokenizer.json"))
    (folder / "models--some--one" / "refs").mkdir()
    (folder / "models--some--one" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder
