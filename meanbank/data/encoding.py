"""Text to token ids, here or in several processes, in the order in which it comes."""

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from tokenizers import Tokenizer

from meanbank.data.readers import Document
from meanbank.data.tokenizer import encode_texts, tokenizer_of_text

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
            yield from zip(pieces, encoded, strict=True)


def _encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[np.ndarray]:
    texts = [piece.text for piece in pieces]
    return [np.asarray(ids, dtype=np.uint32) for ids in encode_texts(tokenizer, texts)]


def _encode_aside(
    batches: Iterator[list[Piece]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[list[Piece], list[np.ndarray]], None, None]:
    """A batch a worker at a time, by turns: whoever is sent text is waiting for it."""
    waiting: deque[tuple[list[Piece], Connection]] = deque()
    with _processes(tokenizer, workers) as connections:
        turns = itertools.cycle(connections)
        for pieces in batches:
            done = _received(*waiting.popleft()) if len(waiting) == workers else None
            connection = next(turns)
            with _death_told():
                connection.send(pieces)
            waiting.append((pieces, connection))
            if done is not None:
                yield done
        while waiting:
            yield _received(*waiting.popleft())


def _received(pieces: list[Piece], connection: Connection) -> tuple[list[Piece], list[np.ndarray]]:
    with _death_told():
        return pieces, connection.recv()


@contextlib.contextmanager
def _death_told() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise ValueError(
            "a process that encodes text has stopped: use fewer workers if memory was short; a "
            "script of your own starts them below `if __name__ == '__main__':` only"
        ) from error


@contextlib.contextmanager
def _processes(tokenizer: Tokenizer, workers: int) -> Iterator[list[Connection]]:
    # Spawned: a fork of a process with threads may hang. Each ends when its connection does, so
    # none is left behind when this process is killed.
    context = multiprocessing.get_context("spawn")
    started, connections = [], []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, tokenizer.to_str()), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            connections.append(ours)
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in started:
            process.join()


def _serve(connection: Connection, tokenizer: str) -> None:
    """What a worker does: batches to token ids, until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that sends
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    own = tokenizer_of_text(tokenizer)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_encode(own, connection.recv()))
