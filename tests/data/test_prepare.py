"""Preparing a corpus: the split, the cache and what is packed."""

import hashlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meanbank.data import prepare
from meanbank.data.config import DataConfig
from meanbank.data.prepare import Corpus, choose_split, cut_text, prepare_corpus
from meanbank.data.sources import Document, Source, open_source
from meanbank.data.tokenizer import END_OF_TEXT, encode_texts, train_tokenizer


class ListSource(Source):
    """Documents from a list."""

    def __init__(self, names: list[str]):
        self.names = names

    def documents(self) -> Iterator[Document]:
        return (Document(name, f"text of {name}") for name in self.names)

    def fingerprint(self) -> str:
        return "list"

    def describe(self) -> dict[str, Any]:
        return {}


def config(folder: Path, **settings: Any) -> DataConfig:
    vocabulary = {} if "tokenizer" in settings else {"vocab_size": 300}
    return DataConfig(source=f"files:{folder}/*.txt", **vocabulary | settings)


def texts(corpus: Corpus, side: str) -> list[str]:
    packed = getattr(corpus, side)
    return [corpus.tokenizer.decode(packed.document(i)[:-1].tolist()) for i in range(len(packed))]


def test_every_document_is_in_one_split_word_for_word(corpus_folder: Path):
    (corpus_folder / "marker.txt").write_text(f"a{END_OF_TEXT}b", encoding="utf-8")
    corpus = prepare_corpus(config(corpus_folder))
    train, held_out = texts(corpus, "train"), texts(corpus, "held_out")
    documents = open_source(f"files:{corpus_folder}/*.txt").documents()
    assert sorted(train + held_out) == sorted(document.text for document in documents)
    for packed in (corpus.train, corpus.held_out):
        ends = packed.tokens == corpus.end_of_text_id
        assert ends.sum() == len(packed)
        assert ends[packed.offsets[1:] - 1].all()
        spoken = corpus.token_bytes[packed.tokens].sum()
        side = train if packed is corpus.train else held_out
        assert spoken == sum(len(text.encode("utf-8")) for text in side)


def test_description_and_vocabulary(corpus_folder: Path):
    corpus = prepare_corpus(config(corpus_folder))
    assert corpus.vocab_size == corpus.tokenizer.get_vocab_size() == 300
    assert corpus.description["fingerprint"] == corpus.fingerprint
    assert corpus.description["documents"]["train"] == len(corpus.train)
    assert corpus.description["tokens"]["held_out"] == len(corpus.held_out.tokens)
    assert corpus.description["source"] == f"files:{corpus_folder}/*.txt"


def test_the_second_call_builds_nothing(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare_corpus(config(corpus_folder))
    monkeypatch.setattr(prepare, "_build", None)
    second = prepare_corpus(config(corpus_folder, batch_size=3, sequence_length=7))
    assert second.fingerprint == first.fingerprint
    assert second.description == first.description
    assert (second.train.tokens == first.train.tokens).all()


def test_two_builds_are_equal_byte_for_byte(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    contents = []
    for name in ("one", "two"):
        monkeypatch.setenv("MEANBANK_CACHE", str(tmp_path / name))
        prepare_corpus(config(corpus_folder))
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append([(path.name, path.read_bytes()) for path in files])
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    "change", [{"split_seed": 1}, {"held_out_fraction": 0.3}, {"vocab_size": 310}]
)
def test_settings_and_content_change_the_fingerprint(corpus_folder: Path, change: dict[str, Any]):
    settings = {"source": f"files:{corpus_folder}/*.txt", "vocab_size": 300}
    before = prepare_corpus(DataConfig(**settings)).fingerprint
    assert prepare_corpus(DataConfig(**settings | change)).fingerprint != before
    (corpus_folder / "00.txt").write_text("other text")
    assert prepare_corpus(DataConfig(**settings)).fingerprint != before


def test_a_named_tokenizer_is_used(corpus_folder: Path, tmp_path: Path):
    tokenizer = train_tokenizer(["some other text"], 270)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare_corpus(config(corpus_folder, tokenizer=str(tmp_path)))
    assert corpus.tokenizer.to_str() == tokenizer.to_str()
    with pytest.raises(ValueError, match="no tokenizer at"):
        prepare_corpus(config(corpus_folder, tokenizer=str(tmp_path / "missing")))


def test_a_named_tokenizer_has_the_vocabulary_that_is_asked_for(
    corpus_folder: Path, tmp_path: Path, cache: Path
):
    train_tokenizer(["some other text"], 260).save(str(tmp_path / "tokenizer.json"))
    wrong = config(corpus_folder, tokenizer=str(tmp_path), vocab_size=300)
    message = rf"data.vocab_size is 300, but the tokenizer {tmp_path} has 260 tokens"
    with pytest.raises(ValueError, match=message):
        prepare_corpus(wrong)
    assert not cache.exists()
    open_one = prepare_corpus(config(corpus_folder, tokenizer=str(tmp_path)))
    right = prepare_corpus(config(corpus_folder, tokenizer=str(tmp_path), vocab_size=260))
    assert right.fingerprint == open_one.fingerprint
    with pytest.raises(ValueError, match=message):  # though the corpus is prepared by now
        prepare_corpus(wrong)


def test_fingerprints_stay_what_they_were(corpus_folder: Path, tmp_path: Path):
    """Prepared corpora of earlier versions are found again."""
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / "tokenizer.json"
    train_tokenizer(["some other text"], 260).save(str(file))
    source = f"files:{corpus_folder}/*.txt"
    given = hashlib.sha256(file.read_bytes()).hexdigest()
    for settings, tokenizer in (
        ({}, "bpe:4096:8000000"),
        ({"vocab_size": 300, "pad_vocab_to": 64}, "bpe:300:8000000"),
        ({"tokenizer": str(file), "pad_vocab_to": 64}, given),
    ):
        key = {
            "format": 1,
            "source": open_source(source).fingerprint(),
            "tokenizer": tokenizer,
            "held_out_fraction": 0.1,
            "split_seed": 0,
        }
        expected = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        assert prepare_corpus(DataConfig(source=source, **settings)).fingerprint == expected


def test_a_tokenizer_of_the_hub(corpus_folder: Path, hub: Path):
    corpus = prepare_corpus(config(corpus_folder, tokenizer="hf:some/one", vocab_size=260))
    assert corpus.vocab_size == 260
    assert corpus.description["tokenizer"] == "hf:some/one"
    assert prepare_corpus(config(corpus_folder, tokenizer="hf:some/one")).fingerprint == (
        corpus.fingerprint
    )


@pytest.mark.parametrize("damage", ["truncate", "change", "remove", "no manifest"])
def test_a_damaged_cache_is_built_again(corpus_folder: Path, cache: Path, damage: str):
    before = prepare_corpus(config(corpus_folder)).train.tokens.tolist()
    (folder,) = (cache / "corpora").iterdir()
    tokens = folder / "train" / "tokens.bin"
    if damage == "truncate":
        os.truncate(tokens, 10)
    elif damage == "change":
        data = bytearray(tokens.read_bytes())
        data[7] ^= 1
        tokens.write_bytes(data)
    elif damage == "remove":
        (folder / "held_out" / "offsets.npy").unlink()
    else:
        (folder / "manifest.json").unlink()
    assert prepare_corpus(config(corpus_folder)).train.tokens.tolist() == before
    assert [path.name for path in (cache / "corpora").iterdir()] == [folder.name]


def test_an_interrupted_build_leaves_nothing(
    corpus_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "encode_texts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(config(corpus_folder))
    assert list((cache / "corpora").iterdir()) == []
    assert len(prepare_corpus(config(corpus_folder)).train) > 0


def test_two_builds_at_once_both_succeed(
    corpus_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    barrier = threading.Barrier(2)
    pack = prepare._pack

    def pack_together(*args: Any) -> Any:
        packed = pack(*args)
        barrier.wait(timeout=30)
        return packed

    monkeypatch.setattr(prepare, "_pack", pack_together)
    built: list[list[int]] = []

    def build() -> None:
        built.append(prepare_corpus(config(corpus_folder)).train.tokens.tolist())

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 2
    assert built[0] == built[1]
    assert len(list((cache / "corpora").iterdir())) == 1


def test_a_cache_that_is_not_writable_says_what_to_set(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEANBANK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="MEANBANK_CACHE"):
        prepare_corpus(config(corpus_folder))


def test_too_few_documents(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="has 0 documents"):
        prepare_corpus(config(tmp_path))
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(ValueError, match="has 1 documents with text, a split needs at least 2"):
        prepare_corpus(config(tmp_path))


def test_recall_has_no_corpus():
    with pytest.raises(ValueError, match="use RecallBatches"):
        prepare_corpus(DataConfig(source="recall"))


names = st.lists(st.text("abc/.", min_size=1), unique=True, min_size=2, max_size=30)


@given(names, st.integers(0, 1000), st.floats(0.01, 0.99), st.randoms())
def test_the_split_does_not_depend_on_the_order(
    listed: list[str], seed: int, fraction: float, shuffler: random.Random
):
    split, size = choose_split(ListSource(listed), seed=seed, held_out_fraction=fraction)
    held_out = {name for name in listed if split.is_held_out(name)}
    assert 0 < len(held_out) < len(listed)
    assert size == sum(len(f"text of {name}".encode()) for name in listed)
    shuffled = shuffler.sample(listed, len(listed))
    again, _ = choose_split(ListSource(shuffled), seed=seed, held_out_fraction=fraction)
    assert again == split


def test_new_documents_leave_the_others_on_their_side():
    first = [f"{i}.txt" for i in range(200)]
    small, _ = choose_split(ListSource(first), seed=0, held_out_fraction=0.1)
    more = first + [f"new{i}.txt" for i in range(200)]
    large, _ = choose_split(ListSource(more), seed=0, held_out_fraction=0.1)
    assert [small.is_held_out(name) for name in first] == [large.is_held_out(n) for n in first]
    assert 5 <= sum(small.is_held_out(name) for name in first) <= 40


def test_the_tokenizer_sample_is_capped_and_from_the_training_split():
    source = ListSource([f"{i:03}" for i in range(100)])
    split, _ = choose_split(source, seed=0, held_out_fraction=0.5)
    train = {d.text for d in source.documents() if not split.is_held_out(d.name)}
    size = len("text of 000")
    sample = prepare._sample(source, split, 10 * size)
    assert len(sample) == 10
    assert set(sample) < train
    assert prepare._sample(source, split, 1) == sample[:1]
    reordered = ListSource(source.names[::-1])
    assert prepare._sample(reordered, split, 10 * size) == sample
    assert set(prepare._sample(source, split, 1000 * size)) == train


TOKENIZER = train_tokenizer(["some words and spaces in a line\n"], 280)
words = st.lists(st.sampled_from(["word", "a", " ", "  ", "\n", "\n    ", "東", ".", "12"])).map(
    "".join
)


@given(words, st.integers(1, 30))
def test_pieces_are_short_and_add_up(text: str, size: int):
    pieces = cut_text(text, size)
    assert "".join(pieces) == text
    assert all(len(piece) <= size for piece in pieces)


@given(st.lists(st.sampled_from([" word", " a", " 12.", "\nline", "\n\n    x"])).map("".join))
def test_a_cut_at_a_space_keeps_the_tokens(text: str):
    whole = "x" + text
    pieces = cut_text(whole, 24)
    # Elsewhere only when no single space lies in the second half of a piece.
    assume(all(re.match(r" \S", piece) for piece in pieces[1:]))
    expected, *parts = encode_texts(TOKENIZER, [whole, *pieces])
    assert [token for part in parts for token in part] == expected


def test_long_documents_are_encoded_in_pieces(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch):
    whole = prepare_corpus(config(corpus_folder)).train.tokens.tolist()
    monkeypatch.setenv("MEANBANK_CACHE", str(corpus_folder / "other"))
    monkeypatch.setattr(prepare, "_PIECE_CHARACTERS", 100)
    assert prepare_corpus(config(corpus_folder)).train.tokens.tolist() == whole
