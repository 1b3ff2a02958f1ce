"""Encoding, also as a process of its own: `python encoder.py FD` serves a connection.

Nothing of meanbank is imported here, so such a process starts at once.
"""

import contextlib
import sys
from multiprocessing.connection import Connection

import numpy as np
from tokenizers import Tokenizer


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, set to encode text as it is: nothing cut, padded or taken for a token."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Means: encode "<|endoftext|>" found in a document as the text that it is.
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of every text, without any special token added."""
    # The fast variant leaves out character offsets, most of an encoding's memory.
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def encode_to_bytes(tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
    """The same as uint32 in the machine's order of bytes."""
    return [np.asarray(ids, np.uint32).tobytes() for ids in encode_texts(tokenizer, texts)]


def serve(connection: Connection) -> None:
    """Answer lists of texts, the first message being the tokenizer, until nobody sends any more."""
    with contextlib.suppress(EOFError, OSError):
        tokenizer = plain(Tokenizer.from_str(connection.recv()))
        while True:
            connection.send(encode_to_bytes(tokenizer, connection.recv()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
