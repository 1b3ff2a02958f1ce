"""Text files as a stream of token ids, of which a piece at a time is in memory."""

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from meanbank.data.encoder import encode_texts
from meanbank.data.tokenizer import end_of_text_id

PIECE = 2**14  # bytes read at a time
LONGEST_WORD = 2**22  # characters; a text is cut there even where there is no such space
# Up to the last single space between visible characters, as `cut_text` cuts.
_WORDS = re.compile(r".*\S(?= \S)", re.DOTALL)


def check_texts(paths: Sequence[Path]) -> int:
    """Bytes of all files; ValueError, in one line, for one that is missing, empty or a folder."""
    if not paths:
        raise ValueError("name at least one text file")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no text file {path}")
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
    return sum(path.stat().st_size for path in paths)


def stream_tokens(paths: Sequence[Path], tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    """Yield (token ids, bytes that they stand for), piece by piece, file after file.

    Between two files stands the end-of-text token, as in training. The ids are those of the whole
    text for the usual byte-level tokenizers, as `cut_text` says. Raises ValueError for text that is
    not UTF-8, and for several files where the tokenizer has no end-of-text token.
    """
    end = end_of_text_id(tokenizer) if len(paths) > 1 else None
    for number, path in enumerate(paths):
        if number and end is not None:
            yield [end], 0
        for text, size in _texts(path):
            yield encode_texts(tokenizer, [text])[0], size


def _texts(path: Path) -> Iterator[tuple[str, int]]:
    """Pieces of a file that end where a word does, and the bytes read for each."""
    decoder, rest, done, pending = codecs.getincrementaldecoder("utf-8")(), "", 0, 0
    try:
        with path.open("rb") as file:
            while data := file.read(PIECE):
                rest += decoder.decode(data)
                pending += len(data)
                done += len(data)
                words = _WORDS.match(rest)
                if words is not None or len(rest) > LONGEST_WORD:
                    cut = len(rest) if words is None else words.end()
                    yield rest[:cut], pending
                    rest, pending = rest[cut:], 0
        rest += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = done - len(decoder.getstate()[0]) + error.start
        raise ValueError(f"{path} is not UTF-8 text (byte {at})") from None
    if rest:
        yield rest, pending
