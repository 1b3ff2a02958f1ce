"""Packed tokens: boundaries, widths and incomplete folders."""

from pathlib import Path

import numpy as np
import pytest

from meanbank.data.packed import PackedTokens, PackedWriter


def write(folder: Path, documents: list[list[int]], vocab_size: int = 100) -> PackedTokens:
    folder.mkdir(exist_ok=True)
    writer = PackedWriter(folder, vocab_size=vocab_size, end_of_text_id=0)
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
    packed = write(tmp_path / "packed", [[vocab_size - 1]], vocab_size)
    assert packed.tokens.dtype == dtype
    assert packed.tokens[0] == vocab_size - 1


def test_tokens_are_mapped_and_read_only(tmp_path: Path):
    packed = write(tmp_path / "packed", [[1]])
    assert isinstance(packed.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        packed.tokens[0] = 2


def test_incomplete_folders_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no packed tokens"):
        PackedTokens.open(tmp_path)
    write(tmp_path / "packed", [[1, 2, 3]])
    (tmp_path / "packed" / "tokens.bin").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="incomplete"):
        PackedTokens.open(tmp_path / "packed")
