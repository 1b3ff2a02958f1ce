"""Preparing a corpus: the split, the cache and what is packed."""

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meanbank.data import cache as caching
from meanbank.data import prepare
from meanbank.data.batches import TextBatches
from meanbank.data.config import DataConfig
from meanbank.data.prepare import Corpus, prepare_corpus
from meanbank.data.recall import RecallBatches, RecallConfig
from meanbank.data.sources import open_source
from meanbank.data.tokenizer import END_OF_TEXT, train_tokenizer


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
    monkeypatch.setattr(prepare, "build_corpus", None)
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


def digest(*arrays: Any) -> str:
    """The first half of the sha256 of all numbers, as int64."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(np.asarray(array), dtype=np.int64).tobytes())
    return found.hexdigest()[:16]


def test_tokens_and_batches_stay_what_they_were(corpus_folder: Path):
    """Recorded before tokens were sharded and sources mixed."""
    corpus = prepare_corpus(config(corpus_folder))
    train, held_out = corpus.train, corpus.held_out
    assert digest(train.tokens, train.offsets) == "f2eb6e2a9296c226"
    assert digest(held_out.tokens, held_out.offsets) == "b7ea8262bc4d68da"
    for seed, pack, expected in (
        (0, "stream", "68f4821adea8bec7"),
        (5, "isolate", "5d08b090d11f153d"),
        (2**40 + 3, "stream", "5f06466b58f97ab9"),
    ):
        batches = TextBatches(
            train, sequence_length=33, batch_size=7, seed=seed, end_of_text_id=0, pack=pack
        )
        assert batches.windows[0].per_epoch == 217
        seen = []
        for step in (0, 1, 30, 200, 199):
            batch = batches.batch(step)
            seen += [batch.input_ids, batch.labels]
            seen += [] if batch.document_ids is None else [batch.document_ids]
        assert digest(*seen) == expected
    recall = RecallBatches(RecallConfig(), batch_size=5, seed=3, steps=10)
    seen = [recall.batch(step) for step in range(10)]
    assert digest(*(t for b in seen for t in (b.input_ids, b.labels))) == "6d8bf98d954f3bd1"


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
    tokens = folder / "train" / "tokens-00000.bin"
    if damage == "truncate":
        os.truncate(tokens, 10)
    elif damage == "change":
        data = bytearray(tokens.read_bytes())
        data[7] ^= 1
        tokens.write_bytes(data)
    elif damage == "remove":
        (folder / "held_out" / "offsets.bin").unlink()
    else:
        (folder / "manifest.json").unlink()
    assert prepare_corpus(config(corpus_folder)).train.tokens.tolist() == before
    assert [path.name for path in (cache / "corpora").iterdir()] == [folder.name]


def test_of_two_builds_at_once_the_second_waits(
    corpus_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    build_corpus, began, builds = prepare.build_corpus, threading.Event(), []

    def build_slowly(*args: Any, **settings: Any) -> int:
        builds.append(args)
        began.set()
        waits.wait(timeout=1)  # the other one has every chance to build, too
        return build_corpus(*args, **settings)

    monkeypatch.setattr(prepare, "build_corpus", build_slowly)
    waits, built = threading.Event(), []

    def build() -> None:
        built.append(prepare_corpus(config(corpus_folder)))

    threads = [threading.Thread(target=build) for _ in range(2)]
    threads[0].start()
    assert began.wait(timeout=30)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert built[0].train.tokens.tolist() == built[1].train.tokens.tolist()
    assert sorted(part.encoded > 0 for corpus in built for part in corpus.parts) == [False, True]
    assert len(list((cache / "corpora").iterdir())) == 1


def test_a_prepared_corpus_is_not_read_to_be_opened(
    corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    prepare_corpus(config(corpus_folder))
    monkeypatch.setattr(caching, "_entry", None)
    prepare_corpus(config(corpus_folder))


def test_a_copied_cache_is_checked_and_used(
    corpus_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    prepare_corpus(config(corpus_folder))
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    (folder,) = (copy / "corpora").iterdir()
    os.utime(folder / "manifest.json", (1, 1))  # every file is newer
    monkeypatch.setenv("MEANBANK_CACHE", str(copy))
    monkeypatch.setattr(prepare, "build_corpus", None)
    prepare_corpus(config(corpus_folder))


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


def test_a_stream_is_read_as_far_as_wanted_and_opens_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'meanbank[data]'")
    datasets = pytest.importorskip("datasets", reason="pip install 'meanbank[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    for number in range(3):
        rows = {"text": [f"some words {number} {row}" for row in range(20)]}
        parquet.write_table(pyarrow.table(rows), tmp_path / "set" / f"train-{number}.parquet")
    settings = {"source": f"hf:{tmp_path}/set", "vocab_size": 280, "held_out_fraction": 0.5}
    some = prepare_corpus(DataConfig(**settings, max_documents=30))
    assert sorted(texts(some, "train") + texts(some, "held_out")) == sorted(
        f"some words {row // 20} {row % 20}" for row in range(30)
    )
    assert some.description["revision"]
    assert some.description["max_documents"] == 30
    assert some.fingerprint != prepare_corpus(DataConfig(**settings)).fingerprint

    def fail(name: str):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    again = prepare_corpus(DataConfig(**settings, max_documents=30))
    assert again.description == some.description
    with pytest.raises(ValueError, match="cannot be reached"):
        prepare_corpus(DataConfig(**settings, max_documents=29))
