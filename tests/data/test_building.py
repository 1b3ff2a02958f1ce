"""Building: killed at any moment it goes on to the same bytes; caps and filters; little memory."""

import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meanbank.data import building, encoding
from meanbank.data.building import Packing, build_corpus
from meanbank.data.cache import build_once
from meanbank.data.config import DataConfig
from meanbank.data.packed import PackedTokens
from meanbank.data.prepare import prepare_corpus
from meanbank.data.readers import Document
from meanbank.data.split import Split
from meanbank.data.tokenizer import train_tokenizer
from meanbank.data.writer import GrowingFile
from tests.data.fakes import ListSource

TOKENIZER = train_tokenizer(["some words and spaces in a line\n"], 280)
TEXTS = {f"{n:02}": f"document {n} " * (n * n % 17 + 1) for n in range(60)}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SHARD_TOKENS", 300)
    monkeypatch.setattr(building, "COMMIT_TOKENS", 200)
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 60)


def build(folder: Path, source: ListSource, config: DataConfig, named: Any = TOKENIZER) -> None:
    def build_aside(aside: Path) -> None:
        build_corpus(aside, source, config, named, workers=1)

    build_once(folder, build_aside)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(".tmp")
    }


class KilledAfter:
    """Stands for a function and kills the process at its call number `calls`, before or after."""

    def __init__(self, function: Any, calls: int, after: bool):
        self.function, self.left, self.after = function, calls, after

    def __get__(self, instance: Any, owner: Any) -> Any:
        return lambda *arguments, **named: self(instance, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if not self.left and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = self.function(*arguments, **named)
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def killed(
    folder: Path, owner: Any, name: str, calls: int, after: bool, config: DataConfig
) -> bool:
    """Whether a build in a process of its own was killed at that call, instead of done before."""
    child = os.fork()
    if not child:
        function = owner.__dict__[name]
        setattr(owner, name, KilledAfter(function, calls, after))
        try:
            build(folder, ListSource(TEXTS), config)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


MOMENTS = [
    (GrowingFile, "append", (1, 2, 40, 90, 150, 230)),  # a piece, an end or an offset is written
    (GrowingFile, "mark", (1, 2, 3, 9, 17)),  # on disk
    (building, "write_json", (1, 2, 3, 5, 8)),  # the plan, then journals
    (Packing, "close", (1,)),
    (Path, "rename", (1,)),  # the last step
]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("owner", "name", "calls"), MOMENTS, ids=[name for _, name, _ in MOMENTS])
def test_a_killed_build_goes_on_to_the_same_bytes(
    tmp_path: Path, owner: Any, name: str, calls: tuple[int, ...]
):
    config = DataConfig(tokenizer="named", held_out_fraction=0.3)
    build(tmp_path / "whole", ListSource(TEXTS), config)
    expected = contents(tmp_path / "whole")
    assert len([file for file in expected if "train/tokens-" in file]) > 5
    for number in calls:
        folder = tmp_path / f"{name}{number}"
        assert killed(folder, owner, name, number, False, config)
        assert not folder.exists()
        killed(folder, owner, name, number, True, config)
        build(folder, ListSource(TEXTS), config)
        assert contents(folder) == expected
        left = [path.name for path in tmp_path.glob(f".{folder.name}*")]
        assert left == ([f".{folder.name}.lock"] if name == "rename" else [])  # nobody holds it


def test_what_is_safe_is_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = DataConfig(tokenizer="named")
    encode, encoded = building.encode_pieces, []

    def encode_some(documents: Any, *arguments: Any, **named: Any) -> Iterator[Any]:
        for piece, ids in encode(documents, *arguments, **named):
            encoded.append(piece)
            if piece.name == "40":
                raise ValueError("stopped")
            yield piece, ids

    with monkeypatch.context() as patch:
        patch.setattr(building, "encode_pieces", encode_some)
        with pytest.raises(ValueError, match="stopped"):
            build(tmp_path / "one", ListSource(TEXTS), config)
    source, before, encoded = ListSource(TEXTS), len(encoded), []
    tokens = build_corpus(tmp_path / ".one.partial", source, config, TOKENIZER, workers=1)
    total = len(PackedTokens.open(tmp_path / ".one.partial" / "train").tokens) + len(
        PackedTokens.open(tmp_path / ".one.partial" / "held_out").tokens
    )
    assert before > 0
    assert 0 < tokens < 0.6 * total
    assert source.reads == len(TEXTS)


def test_a_damaged_part_is_built_again(tmp_path: Path):
    config = DataConfig(tokenizer="named")
    build(tmp_path / "whole", ListSource(TEXTS), config)
    aside = tmp_path / ".one.partial"
    aside.mkdir()
    build_corpus(aside, ListSource(TEXTS), config, TOKENIZER, workers=1)
    shard = aside / "train" / "tokens-00002.bin"
    shard.write_bytes(shard.read_bytes()[::-1])
    build(tmp_path / "one", ListSource(TEXTS), config)
    assert contents(tmp_path / "one") == contents(tmp_path / "whole")


def test_an_empty_side_gets_the_nearest_document(tmp_path: Path):
    for fraction in (1e-9, 1 - 1e-9):
        config = DataConfig(tokenizer="named", held_out_fraction=fraction)
        folder = tmp_path / f"{fraction}"
        build(folder, ListSource(TEXTS), config)
        sides = [PackedTokens.open(folder / side) for side in building.SIDES]
        assert sorted(map(len, sides)) == [1, len(TEXTS) - 1]
        draws = sorted(TEXTS, key=Split(seed=0, cut=0).draw)
        alone = min(sides, key=len).document(0)[:-1].tolist()
        assert TOKENIZER.decode(alone) == TEXTS[draws[0] if fraction < 0.5 else draws[-1]]


def kept(folder: Path) -> list[str]:
    """All documents of both sides."""
    sides = [PackedTokens.open(folder / side) for side in building.SIDES]
    return [
        TOKENIZER.decode(packed.document(i)[:-1].tolist())
        for packed in sides
        for i in range(len(packed))
    ]


@pytest.mark.parametrize("named", [TOKENIZER, None])
def test_caps_keep_the_first_documents(tmp_path: Path, named: Any):
    settings = {"tokenizer": "named"} if named else {"vocab_size": 280}
    config = DataConfig(max_documents=7, held_out_fraction=0.5, **settings)
    source = ListSource(TEXTS)
    build(tmp_path / "some", source, config, named)
    if named:
        assert sorted(kept(tmp_path / "some")) == sorted(list(TEXTS.values())[:7])
    # the rest is not even read, and the first ones twice only to train a tokenizer
    assert source.reads <= (8 if named else 8 + 7)
    sides = [PackedTokens.open(tmp_path / "some" / side) for side in building.SIDES]
    assert sum(map(len, sides)) == 7


def test_a_cap_of_tokens_keeps_the_document_that_reaches_it(tmp_path: Path):
    lengths = [len(TOKENIZER.encode(text).ids) + 1 for text in TEXTS.values()]
    for tokens in (sum(lengths[:5]), sum(lengths[:5]) + 1):
        folder = tmp_path / f"{tokens}"
        build(folder, ListSource(TEXTS), DataConfig(tokenizer="named", max_tokens=tokens))
        documents = 5 if tokens == sum(lengths[:5]) else 6
        assert sorted(kept(folder)) == sorted(list(TEXTS.values())[:documents])


def test_short_documents_are_left_out_and_counted(tmp_path: Path):
    lengths = {name: len(TOKENIZER.encode(text).ids) + 1 for name, text in TEXTS.items()}
    least = lengths["01"]
    long = [name for name, length in lengths.items() if length >= least]
    assert 10 < len(long) < len(TEXTS)
    config = DataConfig(tokenizer="named", min_document_tokens=least)
    build(tmp_path / "long", ListSource(TEXTS), config)
    assert sorted(kept(tmp_path / "long")) == sorted(TEXTS[name] for name in long)
    short = {name: length for name, length in lengths.items() if length < least}
    built = building.read_json(tmp_path / "long" / "corpus.json")
    assert built["shorter_documents"] == {"documents": len(short), "tokens": sum(short.values())}
    assert sum(built["bytes"].values()) == sum(len(TEXTS[name]) for name in long)
    config = DataConfig(tokenizer="named", min_document_tokens=10**6)
    with pytest.raises(ValueError, match=r"has 0 documents with text \(60 are shorter than data"):
        build(tmp_path / "none", ListSource(TEXTS), config)


def test_what_is_left_out_is_told(corpus_folder: Path, capsys: pytest.CaptureFixture[str]):
    settings = {"source": f"files:{corpus_folder}/*.txt", "vocab_size": 300}
    plain = prepare_corpus(DataConfig(**settings))
    assert "left out" not in capsys.readouterr().err
    corpus = prepare_corpus(DataConfig(**settings, min_document_tokens=100))
    assert corpus.fingerprint != plain.fingerprint
    found = corpus.description["shorter_documents"]
    assert found["documents"] == len(plain.train) + len(plain.held_out) - len(corpus.train) - len(
        corpus.held_out
    )
    assert f"{found['documents']} documents, {found['tokens']} tokens" in capsys.readouterr().err
    settings |= {"pack": "document", "sequence_length": 64}
    rows = prepare_corpus(DataConfig(**settings)).description["left_out_of_rows"]
    lengths = plain.train.lengths - 1
    assert rows == {"documents": int((lengths < 64).sum()), "tokens": int((lengths % 64).sum())}
    assert "in no row of an epoch" in capsys.readouterr().err


class OneLongDocument(ListSource):
    """A document of a million characters, made when it is asked for, and two shorter ones."""

    def documents(self) -> Iterator[Document]:
        yield Document("long", "word " * 200_000)
        yield Document("other", "word " * 200)
        yield Document("short", "word")


@pytest.mark.parametrize("least", [None, 500])
def test_a_long_document_is_never_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int | None
):
    def encode_nothing(tokenizer: Any, texts: list[str]) -> list[bytes]:
        return [np.ones(len(text), np.uint32).tobytes() for text in texts]

    monkeypatch.setattr(building, "SHARD_TOKENS", 10**6)
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 10_000)
    monkeypatch.setattr(encoding, "encode_to_bytes", encode_nothing)
    config = DataConfig(tokenizer="named", min_document_tokens=least, max_documents=3)
    tracemalloc.start()
    try:
        build(tmp_path / "built", OneLongDocument([]), config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 10**6 < peak < 1.6 * 10**6
    sides = [PackedTokens.open(tmp_path / "built" / side) for side in building.SIDES]
    assert max(packed.lengths.max() for packed in sides) == 10**6 + 1
    assert sum(map(len, sides)) == (2 if least else 3)
