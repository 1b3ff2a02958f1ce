"""Tensors as the bytes of a safetensors file, against that package."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from meanbank.core.safetensors_file import NAMES, safetensors_pieces


def whole(tensors):
    return b"".join(bytes(piece) for piece in safetensors_pieces(tensors, {"format": "pt"}))


def test_every_dtype_and_shape_is_read_back():
    tensors = {}
    for number, dtype in enumerate(NAMES):
        tensors[f"rows.{number}"] = (torch.arange(15).reshape(3, 5) % 2).to(dtype)
        tensors[f"scalar.{number}"] = torch.tensor(1).to(dtype)
        tensors[f"none.{number}"] = torch.empty(0, 4, dtype=dtype)
    tensors["turned"] = torch.randn(4, 3).t()
    found = load(whole(tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_numbers_are_aligned_and_words_are_there(tmp_path):
    content = whole({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.double)})
    (tmp_path / "x.safetensors").write_bytes(content)
    header = int.from_bytes(content[:8], "little")
    assert header % 8 == 0
    assert content[8 + header :] == 2 * bytes.fromhex("000000000000f03f") + b"\1\1\1"
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_tensors_come_in_pieces():
    pieces = list(safetensors_pieces({"a": torch.zeros(3_000_000)}, {}))
    assert max(map(len, pieces)) == 2**20
    assert torch.equal(load(b"".join(map(bytes, pieces)))["a"], torch.zeros(3_000_000))


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(KeyError):
        whole({"a": torch.zeros(2, dtype=torch.complex64)})
