"""The split and the tokenizer's sample depend on names, not on order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanbank.data.split import Split, Survey, survey, text_bytes
from tests.data.fakes import ListSource

names = st.lists(st.text("abc/.", min_size=1), unique=True, min_size=2, max_size=30)


def surveyed(listed: list[str], seed: int, cut: float, sample_bytes: int = 10**6) -> Survey:
    return survey(ListSource(listed).documents, Split(seed=seed, cut=cut), sample_bytes)


@given(names, st.integers(0, 1000), st.floats(0.01, 0.99), st.randoms())
def test_the_split_does_not_depend_on_the_order(
    listed: list[str], seed: int, fraction: float, shuffler: random.Random
):
    found = surveyed(listed, seed, fraction)
    held_out = {name for name in listed if found.split.is_held_out(name)}
    assert 0 < len(held_out) < len(listed)
    assert found.bytes == sum(len(f"text of {name}".encode()) for name in listed)
    assert set(found.sample) == {f"text of {name}" for name in set(listed) - held_out}
    assert surveyed(shuffler.sample(listed, len(listed)), seed, fraction) == found
    draws = [found.split.draw(name) for name in listed]
    assert found.split.settled(min(draws), max(draws)) == found.split


def test_new_documents_leave_the_others_on_their_side():
    first = [f"{i}.txt" for i in range(200)]
    small = surveyed(first, 0, 0.1).split
    large = surveyed(first + [f"new{i}.txt" for i in range(200)], 0, 0.1).split
    assert [small.is_held_out(name) for name in first] == [large.is_held_out(n) for n in first]
    assert 5 <= sum(small.is_held_out(name) for name in first) <= 40


def test_the_tokenizer_sample_is_capped_and_from_the_training_split():
    listed = [f"{i:03}" for i in range(100)]
    whole = surveyed(listed, 0, 0.5)
    train = {f"text of {name}" for name in listed if not whole.split.is_held_out(name)}
    size = len("text of 000")
    sample = surveyed(listed, 0, 0.5, 10 * size).sample
    assert len(sample) == 10
    assert set(sample) < train
    assert surveyed(listed, 0, 0.5, 1).sample == sample[:1]
    assert surveyed(listed[::-1], 0, 0.5, 10 * size).sample == sample
    assert set(whole.sample) == train


def test_one_document_cannot_be_split():
    with pytest.raises(ValueError, match="has 1 documents with text, a split needs at least 2"):
        surveyed(["one"], 0, 0.5)


@given(st.text("aé東🙂"), st.integers(1, 5))
def test_bytes_of_a_text(text: str, block: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meanbank.data.split._BLOCK", block)
        assert text_bytes(text) == len(text.encode())
