"""Documents to token ids: in pieces, in order, in any number of processes."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meanbank.data import encoding
from meanbank.data.encoder import encode_texts
from meanbank.data.encoding import chosen_workers, cut_text, encode_pieces
from meanbank.data.readers import Document
from meanbank.data.tokenizer import END_OF_TEXT, train_tokenizer

TOKENIZER = train_tokenizer(["some words and spaces in a line\n"], 280)
words = st.lists(st.sampled_from(["word", "a", " ", "  ", "\n", "\n    ", "東", ".", "12"])).map(
    "".join
)


@given(words, st.integers(1, 30))
def test_pieces_are_short_and_add_up(text: str, size: int):
    pieces = list(cut_text(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) <= size for piece in pieces)


@given(st.lists(st.sampled_from([" word", " a", " 12.", "\nline", "\n\n    x"])).map("".join))
def test_a_cut_at_a_space_keeps_the_tokens(text: str):
    whole = "x" + text
    pieces = list(cut_text(whole, 24))
    # Elsewhere only when no single space lies in the second half of a piece.
    assume(all(re.match(r" \S", piece) for piece in pieces[1:]))
    expected, *parts = encode_texts(TOKENIZER, [whole, *pieces])
    assert [token for part in parts for token in part] == expected


def encoded(documents: list[Document], workers: int) -> list[tuple[str, bool, list[int]]]:
    pieces = encode_pieces(documents, TOKENIZER, workers=workers)
    return [(piece.name, piece.is_last, ids.tolist()) for piece, ids in pieces]


def test_processes_give_the_same_in_the_same_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 40)
    texts = [f"words {n} in a line {END_OF_TEXT} " * (n % 7 + 1) for n in range(30)]
    documents = [Document(f"{n}", text) for n, text in enumerate(texts)]
    here = encoded(documents, 1)
    whole = {document.name: [] for document in documents}
    for name, _, ids in here:
        whole[name] += ids
    assert [TOKENIZER.decode(ids) for ids in whole.values()] == texts
    assert [name for name, is_last, _ in here if is_last] == list(whole)
    assert encoded(documents, 3) == here
    assert encoded(documents[:1], 3) == [entry for entry in here if entry[0] == "0"]
    assert encoded([], 2) == []


def test_reading_is_a_batch_a_worker_ahead_and_can_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 20)
    read = []

    def documents() -> Iterator[Document]:
        for number in range(1000):
            read.append(number)
            yield Document(f"{number}", "twenty letters a doc")

    for workers, ahead in ((1, 0), (2, 2)):
        read.clear()
        pieces = encode_pieces(documents(), TOKENIZER, workers=workers)
        for taken in range(5):
            assert next(pieces)[0].name == str(taken)
            assert len(read) <= taken + 1 + ahead
        pieces.close()  # processes have ended when it returns


def test_a_worker_that_dies_is_told():
    ours, theirs = encoding.Pipe()
    theirs.close()
    with pytest.raises(ValueError, match="has stopped: use fewer workers"):
        encoding._received([], ours)


def test_the_number_of_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MEANBANK_WORKERS", raising=False)
    assert (chosen_workers(None), chosen_workers(3)) == (1, 3)
    monkeypatch.setenv("MEANBANK_WORKERS", "5")
    assert (chosen_workers(None), chosen_workers(3)) == (5, 3)
    for wrong in ("0", "-2", "many"):
        monkeypatch.setenv("MEANBANK_WORKERS", wrong)
        with pytest.raises(ValueError, match=rf"MEANBANK_WORKERS must be .*, got {wrong}"):
            chosen_workers(None)
    with pytest.raises(ValueError, match=r"the number of workers must be .*, got 0"):
        chosen_workers(0)
