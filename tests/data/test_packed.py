"""Packed tokens: boundaries, widths, shards, and incomplete folders."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanbank.data.packed import PackedTokens, ShardedTokens
from meanbank.data.writer import PackedWriter


def write(
    folder: Path, documents: list[list[int]], vocab_size: int = 100, **settings
) -> PackedTokens:
    writer = PackedWriter(folder, vocab_size=vocab_size, end_of_text_id=0, **settings)
    for document in documents:
        for token in document:
            writer.append([token])
        writer.end_document()
    writer.close()
    return PackedTokens.open(folder)


def test_documents_and_boundaries(tmp_path: Path):
    packed = write(tmp_path / "packed", [[5, 6, 7], [8], [1, 2, 3, 4, 5]])
    assert len(packed) == 3
    assert packed.tokens.tolist() == [5, 6, 7, 0, 8, 0, 1, 2, 3, 4, 5, 0]
    assert packed.document(1).tolist() == [8, 0]
    assert packed.offsets.dtype == np.int64
    assert packed.lengths.tolist() == [4, 2, 6]
    assert packed.documents_at_least(4).tolist() == [0, 2]
    assert packed.documents_at_least(7).tolist() == []
    for index in (-1, 3):
        with pytest.raises(IndexError):
            packed.document(index)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (151_936, "uint32")]
)
def test_the_width_fits_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str):
    for shard_tokens in (1, 9):
        folder = tmp_path / f"packed{shard_tokens}"
        packed = write(folder, [[vocab_size - 1]], vocab_size, shard_tokens=shard_tokens)
        assert packed.tokens.dtype == dtype
        assert packed.tokens[0] == vocab_size - 1


@pytest.mark.parametrize("shard_tokens", [2, 9])
def test_tokens_are_mapped_and_read_only(tmp_path: Path, shard_tokens: int):
    packed = write(tmp_path / "packed", [[1, 2, 3]], shard_tokens=shard_tokens)
    shards = packed.tokens.shards if shard_tokens == 2 else [packed.tokens]
    assert len(shards) == (2 if shard_tokens == 2 else 1)
    for shard in shards:
        assert isinstance(shard, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            shard[0] = 2


@pytest.mark.parametrize("damage", ["tokens-00000.bin", "tokens-00001.bin", "offsets.bin"])
def test_incomplete_folders_are_refused(tmp_path: Path, damage: str):
    with pytest.raises(ValueError, match="no packed tokens"):
        PackedTokens.open(tmp_path)
    write(tmp_path / "packed", [[1, 2, 3]], shard_tokens=3)
    file = tmp_path / "packed" / damage
    whole = file.read_bytes()
    file.write_bytes(whole * 2)
    with pytest.raises(ValueError, match="incomplete"):
        PackedTokens.open(tmp_path / "packed")
    file.unlink()
    with pytest.raises(ValueError, match="no packed tokens"):
        PackedTokens.open(tmp_path / "packed")


documents = st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=8)


@given(documents, st.integers(1, 12), st.data())
def test_shards_read_as_one(listed: list[list[int]], shard_tokens: int, data: st.DataObject):
    with TemporaryDirectory() as folder:
        packed = write(Path(folder) / "packed", listed, shard_tokens=shard_tokens)
        stream = np.array([token for document in listed for token in [*document, 0]])
        files = sorted(Path(folder, "packed").glob("tokens-*"))
        assert [f.stat().st_size // 2 for f in files[:-1]] == [shard_tokens] * (len(files) - 1)
        assert len(files) == -(-len(stream) // shard_tokens)
        tokens, size = packed.tokens, len(stream)
        assert len(tokens) == size
        assert np.asarray(tokens).tolist() == stream.tolist()
        ends = st.none() | st.integers(-size - 2, size + 2)
        here = data.draw(st.builds(slice, ends, ends, st.none() | st.sampled_from([1, 2, -1, -3])))
        assert tokens[here].tolist() == stream[here].tolist()
        places = data.draw(st.lists(st.integers(-size, size - 1), min_size=4, max_size=4))
        square = np.array(places).reshape(2, 2)
        assert tokens[square].tolist() == stream[square].tolist()
        assert tokens[places[0]] == stream[places[0]]
        for index, document in enumerate(listed):
            assert packed.document(index).tolist() == [*document, 0]


def test_positions_beyond_the_shards_are_refused():
    tokens = ShardedTokens([np.arange(3), np.arange(2)])
    for position in (5, -6):
        with pytest.raises(IndexError):
            tokens[position]
    assert tokens[np.empty((0, 3), dtype=np.int64)].shape == (0, 3)


def test_joined_parts_follow_each_other(tmp_path: Path):
    one = write(tmp_path / "one", [[1, 2, 3], [4]], shard_tokens=3)
    two = write(tmp_path / "two", [[5], [6, 7]])
    joined = PackedTokens.joined([one, two])
    assert np.asarray(joined.tokens).tolist() == [1, 2, 3, 0, 4, 0, 5, 0, 6, 7, 0]
    assert joined.offsets.tolist() == [0, 4, 6, 8, 11]
    assert joined.document(2).tolist() == [5, 0]
    assert joined.tokens.shards == (*one.tokens.shards, two.tokens)  # the maps themselves
    assert PackedTokens.joined([one]) is one


@given(documents, documents, st.integers(1, 7))
def test_a_writer_goes_on_from_a_mark(
    before: list[list[int]], after: list[list[int]], shard_tokens: int
):
    settings = {"vocab_size": 100, "end_of_text_id": 0, "shard_tokens": shard_tokens}
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = write(folder / "whole", before + after, shard_tokens=shard_tokens)
        killed = PackedWriter(folder / "killed", **settings)
        for number, document in enumerate([*before, *after, [9] * 20]):
            if number == len(before):
                mark = killed.mark()
            killed.append(document)
            killed.end_document()
        killed.mark()  # what was written after the first mark is there, and is dropped
        writer = PackedWriter(folder / "killed", **settings, mark=mark)
        for document in after:
            writer.append(document)
            writer.end_document()
        writer.close()
        assert np.asarray(PackedTokens.open(folder / "killed").tokens).tolist() == (
            np.asarray(whole.tokens).tolist()
        )
        for file in (folder / "whole").iterdir():
            assert (folder / "killed" / file.name).read_bytes() == file.read_bytes()
        assert len(list((folder / "killed").iterdir())) == len(list((folder / "whole").iterdir()))


def test_a_writer_does_not_go_on_from_other_files(tmp_path: Path):
    writer = PackedWriter(tmp_path, vocab_size=100, end_of_text_id=0, shard_tokens=3)
    writer.append([1, 2, 3, 4])
    writer.end_document()
    mark = writer.mark()
    file = tmp_path / "tokens-00000.bin"
    file.write_bytes(b"\1\1" + file.read_bytes()[2:])
    with pytest.raises(ValueError, match="does not hold what was written to it"):
        PackedWriter(tmp_path, vocab_size=100, end_of_text_id=0, shard_tokens=3, mark=mark)


@pytest.mark.parametrize("ids", [[1000], [-1], [70_000, 5]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], tmp_path: Path):
    writer = PackedWriter(tmp_path, vocab_size=1000, end_of_text_id=0)
    with pytest.raises(ValueError, match="from 0 to 999"):
        writer.append(np.array(ids))
    writer.append([999, 0])
    writer.append([])
