"""A safetensors file of named tensors and words that is checked in full before use.

The header is written in one form only, without escapes or spaces, and read in that form only: a
few regular expressions in place of a JSON parser that would accept, and build, anything. Its own
sha256 is in it, as is that of each tensor, so no bit can change unnoticed.
"""

import dataclasses
import hashlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from meanbank.core.errors import ContextFileError
from meanbank.core.files import whole_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
}
MAX_HEADER = 32 * 2**20  # bytes
MAX_TENSORS = 65_536
MAX_NAME, MAX_WORD = 256, 2**20  # characters
MAX_DIMENSIONS = 8
PIECE = 2**20  # numbers or bytes handled at a time

DIGEST, SHA256 = "header_sha256", "sha256:"  # the header's own; the prefix of a tensor's
_STRING = rb"[ !#-\[\]-~]*"  # printable ASCII without quote and backslash
_NUMBER = rb"(?:0|[1-9][0-9]{0,15})"
_OPEN = re.compile(rb'\{"__metadata__":\{')
_PAIR = re.compile(rb'"(' + _STRING + rb')":"(' + _STRING + rb')"(,|\})')
_ENTRY = re.compile(
    rb',"(' + _STRING + rb')":\{"dtype":"([A-Z0-9]+)",'
    rb'"shape":\[((?:' + _NUMBER + rb"(?:," + _NUMBER + rb')*)?)\],"data_offsets":'
    rb"\[(" + _NUMBER + rb"),(" + _NUMBER + rb")\]\}"
)
_CLOSE = re.compile(rb"\} {0,7}")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: bytes [start, stop) of the payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says about itself: words, tensors in the order of the file, bytes in all."""

    words: dict[str, str]
    entries: dict[str, Entry]
    payload_at: int
    nbytes: int


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str], *, overwrite: bool
) -> None:
    """Write a new file, whole or not at all.

    One tensor at a time is held in main memory. Raises ContextFileError where something does not
    fit the format or is not finite, and FileExistsError as `whole_file` does.
    """
    entries, digests = _entries(tensors), {}
    with whole_file(path, overwrite=overwrite) as file:
        blank = _header(words, entries, dict.fromkeys(tensors, "0" * 64))
        file.write(blank)
        for name in entries:
            tensor = tensors[name].detach().cpu().contiguous()
            check_numbers(name, tensor)
            digests[name] = hashlib.sha256()
            for piece in pieces_of(tensor):
                digests[name].update(piece)
                file.write(piece)
        header = _header(words, entries, {name: x.hexdigest() for name, x in digests.items()})
        assert len(header) == len(blank)
        file.seek(0)
        file.write(header)


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Tensors in the order of the file: the widest numbers first, so that all are aligned."""
    known = set(DTYPES.values())
    entries, start = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in known:
            raise ContextFileError(f"{name} is of {tensor.dtype}, which has no form in a file")
        stop = start + tensor.numel() * tensor.element_size()
        entries[name] = Entry(name, tensor.dtype, tuple(tensor.shape), start, stop)
        start = stop
    return entries


def _header(words: Mapping[str, str], entries: dict[str, Entry], digests: dict[str, str]) -> bytes:
    """The 8 bytes of the length and the header, padded to a multiple of 8 bytes."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    pairs = {DIGEST: "0" * 64, **words}
    pairs.update((SHA256 + name, digest) for name, digest in digests.items())
    quoted = (f'"{name}":"{word}"' for name, word in pairs.items())
    parts = ['{"__metadata__":{' + ",".join(quoted) + "}"]
    for entry in entries.values():
        shape = ",".join(map(str, entry.shape))
        parts.append(
            f'"{entry.name}":{{"dtype":"{names[entry.dtype]}","shape":[{shape}],'
            f'"data_offsets":[{entry.start},{entry.stop}]}}'
        )
    text = ",".join(parts) + "}"
    body = (text + " " * (-len(text) % 8)).encode("ascii", "replace")
    at = body.index(b'":"') + 3
    body = body[:at] + hashlib.sha256(body).hexdigest().encode() + body[at + 64 :]
    read_body(body)  # what is written can be read
    return len(body).to_bytes(8, "little") + body


def open_tensors(path: Path) -> IO[bytes]:
    """Open a regular file to read; ContextFileError where there is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ContextFileError(f"{path} is not a file")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ContextFileError(f"cannot read {path}: {error.strerror}") from None


def read_header(file: IO[bytes]) -> Header:
    """Read the header and check everything that can be checked without the tensors.

    Raises ContextFileError.
    """
    nbytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if nbytes < 8 or length > nbytes - 8:
        raise ContextFileError("the file is too short: it has been cut off, or is something else")
    if not length or length > MAX_HEADER or length % 8:
        raise ContextFileError(f"a header of {length} bytes is not one of ours")
    words, entries = read_body(_read(file, length))
    stop = 0
    for entry in entries.values():
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.start != stop or entry.stop - entry.start != size:
            raise ContextFileError(f"the place of {entry.name} in the file is wrong")
        stop = entry.stop
    if 8 + length + stop != nbytes:
        raise ContextFileError(f"the file has {nbytes} bytes, its header says {8 + length + stop}")
    if {name for name in words if name.startswith(SHA256)} != {SHA256 + n for n in entries}:
        raise ContextFileError("the checksums are not those of the tensors")
    return Header(words, entries, 8 + length, nbytes)


def read_body(body: bytes | bytearray) -> tuple[dict[str, str], dict[str, Entry]]:
    """Words and tensors of a header, its own checksum checked. Raises ContextFileError."""
    words, at, digest_at = _read_words(body)
    entries: dict[str, Entry] = {}
    while (match := _ENTRY.match(body, at)) is not None:
        at = match.end()
        name, dtype = match[1].decode("ascii"), match[2].decode("ascii")
        dimensions = match[3].count(b",") + 1
        if name in entries:
            raise ContextFileError(f"the header names {name[:80]!r} twice")
        if len(entries) == MAX_TENSORS or len(name) > MAX_NAME or dimensions > MAX_DIMENSIONS:
            raise ContextFileError("the header has too many tensors, dimensions or long names")
        if dtype not in DTYPES:
            choices = ", ".join(DTYPES)
            raise ContextFileError(f"{name} is of dtype {dtype[:8]!r}, not of {choices}")
        shape = tuple(map(int, match[3].split(b","))) if match[3] else ()
        entries[name] = Entry(name, DTYPES[dtype], shape, int(match[4]), int(match[5]))
    if _CLOSE.fullmatch(body, at) is None:
        raise ContextFileError(f"the header is malformed at byte {at}")
    view, digest = memoryview(body), hashlib.sha256()
    for part in (view[:digest_at], b"0" * 64, view[digest_at + 64 :]):
        digest.update(part)
    if digest.hexdigest() != words[DIGEST]:
        raise ContextFileError("the header is damaged: its checksum differs")
    return words, entries


def _read_words(body: bytes | bytearray) -> tuple[dict[str, str], int, int]:
    """The words, where they end, and where the checksum of the header stands."""
    words: dict[str, str] = {}
    opened = _OPEN.match(body)
    if opened is None:
        raise ContextFileError("the header is not one of ours")
    at, more, digest_at = opened.end(), True, 0
    while more:
        match = _PAIR.match(body, at)
        if match is None:
            raise ContextFileError(f"the header is malformed at byte {at}")
        at, more = match.end(), match[3] == b","
        if match.end(1) - match.start(1) > MAX_NAME or match.end(2) - match.start(2) > MAX_WORD:
            raise ContextFileError("the header has a name or a word that is too long")
        name = match[1].decode("ascii")
        if name in words:
            raise ContextFileError(f"the header names {name[:80]!r} twice")
        if len(words) == 3 * MAX_TENSORS:
            raise ContextFileError("the header has too many words")
        words[name] = match[2].decode("ascii")
        if name == DIGEST:
            digest_at = match.start(2)
    if len(words.get(DIGEST, "")) != 64:
        raise ContextFileError("the header has no checksum of its own")
    return words, at, digest_at


def read_tensor(file: IO[bytes], header: Header, entry: Entry) -> Tensor:
    """Read one tensor to main memory and check its checksum and numbers.

    Raises ContextFileError.
    """
    file.seek(header.payload_at + entry.start)
    tensor, digest = torch.empty(entry.shape, dtype=entry.dtype, device="cpu"), hashlib.sha256()
    for piece in pieces_of(tensor):
        _read_into(file, piece)
        digest.update(piece)
    if digest.hexdigest() != header.words[SHA256 + entry.name]:
        raise ContextFileError(f"{entry.name} is damaged: its checksum differs")
    check_numbers(entry.name, tensor)
    return tensor


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise ContextFileError where a number is not finite, or an integer negative."""
    for piece in tensor.flatten().split(PIECE):
        if piece.is_floating_point():
            if not bool(torch.isfinite(piece).all()):
                raise ContextFileError(f"{name} has numbers that are not finite")
        elif piece.numel() and int(piece.amin()) < 0:
            raise ContextFileError(f"{name} has negative integers")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory, without a copy."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor in main memory, some at a time."""
    if tensor.numel():
        view = tensor_bytes(tensor)
        yield from (view[at : at + PIECE] for at in range(0, len(view), PIECE))


def _read(file: IO[bytes], length: int) -> bytearray:
    data = bytearray(length)
    _read_into(file, memoryview(data))
    return data


def _read_into(file: IO[bytes], piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        count = file.readinto(piece[done:])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise ContextFileError("the file ends too early")
        done += count
