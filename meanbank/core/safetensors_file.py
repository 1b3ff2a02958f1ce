"""Any tensors as a safetensors file, piece by piece."""

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meanbank.core.tensor_file import pieces_of

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def safetensors_pieces(
    tensors: Mapping[str, Tensor], words: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The bytes of a file as `safetensors.torch.save_file` writes it, some at a time.

    That one writes past Python: here whoever writes sees every byte, to sum it up or to be
    refused, and there is no second copy of the tensors. Raises KeyError for a dtype without name.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(words)}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    body = json.dumps(header, separators=(",", ":")).encode("utf-8")
    body += b" " * (-len(body) % 8)
    yield len(body).to_bytes(8, "little") + body
    for _, tensor in ordered:
        yield from pieces_of(tensor.detach().cpu().contiguous())
