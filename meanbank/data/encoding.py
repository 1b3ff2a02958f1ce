"""Text to token ids, here or in several processes, in the order in which it comes."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

import numpy as np
from tokenizers import Tokenizer

from meanbank.data import encoder
from meanbank.data.encoder import encode_to_bytes
from meanbank.data.readers import Document

WORKERS = "MEANBANK_WORKERS"
PIECE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Piece:
    """A part of a document: `text`, and whether it is the last one of the document `name`."""

    name: str
    text: str
    is_last: bool


def chosen_workers(workers: int | None) -> int:
    """The processes to encode with: `workers`, or `MEANBANK_WORKERS`, or 1.

    Raises ValueError for what is no positive number.
    """
    setting = os.environ.get(WORKERS) or "1" if workers is None else str(workers)
    if not setting.isdigit() or int(setting) < 1:
        where = WORKERS if workers is None else "the number of workers"
        raise ValueError(f"{where} must be a whole number from 1 on, got {setting}")
    return int(setting)


def cut_text(text: str, size: int) -> Iterator[str]:
    """Cuts a text into pieces of at most `size` characters, so that encoding needs little memory.

    A cut comes before a single space between visible characters, where the usual byte-level
    tokenizers start a new word anyway: the tokens stay those of the whole text. Without such a
    place in the second half of a piece the cut is anywhere, which still decodes to the same text.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        first = start + max(size // 2, 1)
        place = text.rfind(" ", first, end)
        while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
            place = text.rfind(" ", first, place)
        end = place if place > 0 else end
        yield text[start:end]
        start = end
    yield text[start:]


def batches_of_pieces(documents: Iterable[Document]) -> Iterator[list[Piece]]:
    """All documents in pieces, about a million characters a list."""
    pieces: list[Piece] = []
    characters = 0
    for document in documents:
        done = 0
        for text in cut_text(document.text, PIECE_CHARACTERS):
            done += len(text)
            pieces.append(Piece(document.name, text, done == len(document.text)))
            characters += len(text)
            if characters >= PIECE_CHARACTERS:
                yield pieces
                pieces, characters = [], 0
    if pieces:
        yield pieces


def encode_pieces(
    documents: Iterable[Document], tokenizer: Tokenizer, *, workers: int
) -> Generator[tuple[Piece, np.ndarray], None, None]:
    """Yields every piece with its token ids (uint32), in order, whatever the number of `workers`.

    One worker is this process, where the tokenizer's own threads take the texts of a batch side by
    side. More are processes of one thread each; this one reads and writes. About a million
    characters a worker are in memory, beside the document that is read.

    Raises ValueError when a worker dies.
    """
    batches = batches_of_pieces(documents)
    if workers == 1:
        results = ((pieces, _encode(tokenizer, pieces)) for pieces in batches)
    else:
        results = _encode_aside(batches, tokenizer, workers)
    with contextlib.closing(results):
        for pieces, encoded in results:
            for piece, data in zip(pieces, encoded, strict=True):
                yield piece, np.frombuffer(data, np.uint32)


def _encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[bytes]:
    return encode_to_bytes(tokenizer, [piece.text for piece in pieces])


def _encode_aside(
    batches: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[list[Piece], list[bytes]], None, None]:
    """A batch a worker at a time, by turns: whoever is sent text is waiting for it."""
    waiting: deque[tuple[list[Piece], Connection]] = deque()
    with _processes(tokenizer, workers) as connections:
        turns = itertools.cycle(connections)
        for pieces in batches:
            done = _received(*waiting.popleft()) if len(waiting) == workers else None
            connection = next(turns)
            with _death_told():
                connection.send([piece.text for piece in pieces])
            waiting.append((pieces, connection))
            if done is not None:
                yield done
        while waiting:
            yield _received(*waiting.popleft())


def _received(pieces: list[Piece], connection: Connection) -> tuple[list[Piece], list[bytes]]:
    with _death_told():
        return pieces, connection.recv()


@contextlib.contextmanager
def _death_told() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise ValueError(
            "a process that encodes text has stopped: use fewer workers if memory was short"
        ) from error


@contextlib.contextmanager
def _processes(tokenizer: Tokenizer, workers: int) -> Iterator[list[Connection]]:
    """Connections to so many processes, which end when their connection does.

    So none is left behind when this process is killed. They are in a group of their own: Ctrl-C is
    for the process that sends.
    """
    started, connections = [], []
    alone = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    try:
        for _ in range(workers):
            ours, theirs = Pipe()
            connections.append(ours)
            with theirs:
                # -P: modules beside the script are not to be found by their bare names
                command = [sys.executable, "-P", encoder.__file__, str(theirs.fileno())]
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=alone, process_group=0
                )
            started.append(process)
            with _death_told():
                ours.send(tokenizer.to_str())
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in started:
            process.wait()
