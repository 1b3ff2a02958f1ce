"""Tensors of safetensors files that stay in the file until they are read, row by row."""

import dataclasses
import json
import mmap
import warnings
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meanbank.core.errors import BankStorageError, one_line

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
}
FLOATING = ("F64", "F32", "BF16", "F16")
CAN_ADVISE = hasattr(mmap.mmap, "madvise")  # not on Windows


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A tensor (rows, width) over the bytes of a file, from byte `offset` on; it is read-only."""

    path: Path
    tensor: Tensor
    pages: mmap.mmap
    offset: int

    def expect_rows(self) -> None:
        """From now on, a row's neighbours are not wanted: the system reads no further than asked.

        Without it, 256 rows of each of 4 tables brought in all of a file of 512 MiB.
        """
        if CAN_ADVISE:
            self.pages.madvise(mmap.MADV_RANDOM)

    def expect_all(self) -> None:
        """From now on, it is read from its first row to its last."""
        if CAN_ADVISE:
            self.pages.madvise(mmap.MADV_SEQUENTIAL)

    def prefetch(self, index: Tensor) -> None:
        """Let the system begin to read some distinct rows (N,), all of them at a time."""
        if not CAN_ADVISE:
            return
        # Left to page faults, rows are read one after the other. Asked for beforehand, 2,048 rows
        # of 4 tables came in a third of the time, and meanwhile the first layers can run.
        stride = self.tensor.stride(0) * self.tensor.element_size()
        start = self.offset + index * stride
        first, last = start // mmap.PAGESIZE, (start + stride - 1) // mmap.PAGESIZE
        for low, high in sorted({*zip(first.tolist(), last.tolist(), strict=True)}):
            length = (high - low + 1) * mmap.PAGESIZE
            self.pages.madvise(mmap.MADV_WILLNEED, low * mmap.PAGESIZE, length)


class MappedFile:
    """A safetensors file whose tensors are mapped; it must stay as it is while they are in use.

    The file is checked by the safetensors library. Raises BankStorageError where it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with safe_open(self.path, "pt") as file:  # checks header, sizes and places
                self.names = frozenset(file.keys())
            with self.path.open("rb") as raw:
                self.start = 8 + int.from_bytes(raw.read(8), "little")
                self.header = json.loads(raw.read(self.start - 8))
                self.pages = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, SafetensorError, ValueError) as error:
            raise BankStorageError(f"cannot map {self.path}: {one_line(error)}") from error

    def tensor(self, name: str, shape: tuple[int, int], dtypes: Collection[str]) -> Mapped:
        """A tensor of that shape and one of these dtypes, by their names in the file.

        Raises BankStorageError where it is something else.
        """
        entry = self.header[name]
        found, dtype = tuple(entry["shape"]), entry["dtype"]
        if found != shape or dtype not in dtypes:
            raise BankStorageError(
                f"{name} in {self.path} is {dtype} of shape {found}, not {' or '.join(dtypes)} of "
                f"shape {shape}"
            )
        offset = self.start + entry["data_offsets"][0]
        with warnings.catch_warnings():
            # read-only is what is wanted, and nothing here writes to it
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(
                self.pages, dtype=DTYPES[dtype], count=shape[0] * shape[1], offset=offset
            )
        return Mapped(self.path, flat.view(shape), self.pages, offset)
