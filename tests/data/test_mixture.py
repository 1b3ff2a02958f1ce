"""Several sources with weights: one tokenizer, their own splits, exact shares."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from meanbank.data import prepare
from meanbank.data.config import DataConfig, WeightedSource
from meanbank.data.prepare import prepare_corpus
from meanbank.data.tokenizer import train_tokenizer


@pytest.fixture
def mixture(corpus_folder: Path, tmp_path: Path) -> DataConfig:
    """Words, and digits that none of them has, 3 to 1."""
    (tmp_path / "digits").mkdir()
    for number in range(30):
        text = " ".join(str(n * number) for n in range(20 + number))
        (tmp_path / "digits" / f"{number}.txt").write_text(text)
    sources = (
        WeightedSource(source=f"files:{corpus_folder}/*.txt", weight=0.75),
        WeightedSource(source=f"files:{tmp_path}/digits/*.txt", weight=0.25),
    )
    return DataConfig(source=sources, vocab_size=300)


def test_parts_are_the_corpora_of_their_sources(mixture: DataConfig, tmp_path: Path):
    train_tokenizer(["some other text"], 270).save(str(tmp_path / "tokenizer.json"))
    named = dataclasses.replace(mixture, tokenizer=str(tmp_path), vocab_size=None)
    corpus = prepare_corpus(named)
    assert [part.turns for part in corpus.parts] == [3, 1]
    for part, share in zip(corpus.parts, named.sources, strict=True):
        single = prepare_corpus(dataclasses.replace(named, source=share.source))
        assert single.parts[0].encoded == 0  # it is the same one
        assert part.name == share.source
        assert part.fingerprint == single.fingerprint
        only = corpus.only(part)
        assert only.held_out is part.held_out
        assert only.description["tokens"] == single.description["tokens"]
        for side in ("train", "held_out"):
            packed, alone = getattr(part, side), getattr(single, side)
            assert np.array_equal(packed.tokens, alone.tokens)
    for side in ("train", "held_out"):
        parts = [getattr(part, side) for part in corpus.parts]
        joined = getattr(corpus, side)
        assert np.asarray(joined.tokens).tolist() == [t for p in parts for t in p.tokens.tolist()]
        assert corpus.description["tokens"][side] == len(joined.tokens)
        assert corpus.description["documents"][side] == sum(map(len, parts))
    told = corpus.description["source"]
    assert [entry["weight"] for entry in told] == [0.75, 0.25]
    assert [entry["source"] for entry in told] == [share.source for share in named.sources]


def test_one_tokenizer_is_trained_on_all_training_splits(
    mixture: DataConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prepare, "SAMPLE_BYTES", 1000)
    samples = []
    train = prepare.trained_tokenizer

    def trained(sample: list[str], config: DataConfig):
        samples.append(sample)
        return train(sample, config)

    monkeypatch.setattr(prepare, "trained_tokenizer", trained)
    corpus = prepare_corpus(mixture)
    (sample,) = samples
    words = [text for text in sample if not text[0].isdigit()]
    digits = [text for text in sample if text[0].isdigit()]
    for texts, size in ((words, 750), (digits, 250)):
        total = sum(len(text.encode()) for text in texts)
        assert total >= size > total - max(len(text.encode()) for text in texts)
    training = [corpus.train.document(i)[:-1].tolist() for i in range(len(corpus.train))]
    assert set(sample) <= {corpus.tokenizer.decode(ids) for ids in training}
    assert corpus.description["tokenizer"] == "byte-level BPE, trained on the training split"
    assert corpus.description["vocab_size"] == corpus.vocab_size == 300
    again = prepare_corpus(mixture)
    assert len(samples) == 1
    assert again.description == corpus.description
    assert sum(part.encoded for part in again.parts) == 0


def test_weights_are_part_of_the_fingerprint(mixture: DataConfig, tmp_path: Path):
    train_tokenizer(["some other text"], 270).save(str(tmp_path / "tokenizer.json"))
    named = dataclasses.replace(mixture, tokenizer=str(tmp_path), vocab_size=None)
    corpus = prepare_corpus(named)
    first, second = named.sources
    other = dataclasses.replace(named, source=(first, dataclasses.replace(second, weight=0.75)))
    changed = prepare_corpus(other)
    assert changed.fingerprint != corpus.fingerprint
    assert sum(part.encoded for part in changed.parts) == 0  # nothing is encoded again
    alone = prepare_corpus(dataclasses.replace(named, source=(first,)))
    single = prepare_corpus(dataclasses.replace(named, source=first.source))
    assert alone.fingerprint == single.fingerprint


def test_workers_do_not_change_the_result(
    mixture: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for workers in (1, 2):
        monkeypatch.setenv("MEANBANK_CACHE", str(tmp_path / f"{workers}"))
        prepare_corpus(mixture, workers=workers)
        root = tmp_path / f"{workers}" / "corpora"
        files = sorted(path for path in root.rglob("*") if path.is_file())
        found.append([(str(path.relative_to(root)), path.read_bytes()) for path in files])
    assert found[0] == found[1]
