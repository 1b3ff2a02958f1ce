"""Text batches: labels, coverage, resuming at any step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanbank.data.batches import IGNORED, TextBatches, document_ids
from meanbank.data.packed import PackedTokens


def stream(tokens: int) -> PackedTokens:
    """Tokens 1, 2, 3, ..., so that a token tells its position."""
    return PackedTokens(
        tokens=np.arange(1, tokens + 1, dtype=np.uint16), offsets=np.array([0, tokens])
    )


def text_batches(tokens: int, length: int, rows: int, seed: int = 0, end: int = 0) -> TextBatches:
    return TextBatches(
        stream(tokens), sequence_length=length, batch_size=rows, seed=seed, end_of_text_id=end
    )


sizes = st.tuples(st.integers(1, 9), st.integers(0, 60)).map(lambda s: (s[0], s[0] + 1 + s[1]))


@given(sizes, st.integers(1, 5), st.integers(0, 10**6))
def test_an_epoch_covers_the_stream_without_overlap(size: tuple[int, int], epoch: int, seed: int):
    length, tokens = size
    batches = text_batches(tokens, length, 1, seed)
    windows = batches.windows[0].per_epoch
    inputs = torch.cat([batches.batch(epoch * windows + i).input_ids[0] for i in range(windows)])
    assert len(set(inputs.tolist())) == windows * length
    assert tokens - windows * length < length


@given(sizes, st.integers(1, 4), st.integers(0, 500), st.integers(0, 10**6))
def test_labels_are_the_next_tokens(size: tuple[int, int], rows: int, step: int, seed: int):
    length, tokens = size
    batch = text_batches(tokens, length, rows, seed).batch(step)
    assert batch.input_ids.shape == batch.labels.shape == (rows, length)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, batch.input_ids % tokens + 1)


@given(sizes, st.integers(1, 4), st.lists(st.integers(0, 50), max_size=8), st.integers(0, 9))
def test_a_batch_depends_on_seed_and_step_only(
    size: tuple[int, int], rows: int, steps: list[int], seed: int
):
    length, tokens = size
    used = text_batches(tokens, length, rows, seed)
    for step in steps:
        fresh = text_batches(tokens, length, rows, seed)
        assert torch.equal(used.batch(step).input_ids, fresh.batch(step).input_ids)


@given(st.integers(1, 4), st.integers(0, 20))
def test_the_batch_size_only_regroups_the_windows(rows: int, step: int):
    single, grouped = text_batches(100, 7, 1), text_batches(100, 7, rows)
    expected = [single.batch(step * rows + row).input_ids for row in range(rows)]
    assert torch.equal(grouped.batch(step).input_ids, torch.cat(expected))


def test_epochs_and_seeds_differ():
    batches = text_batches(1000, 10, 100)
    epochs = [batches.batch(step).input_ids[:, 0] for step in range(5)]
    assert len({int(starts.min()) for starts in epochs}) > 1
    assert not torch.equal(epochs[0], text_batches(1000, 10, 100, seed=1).batch(0).input_ids[:, 0])


def test_nothing_is_predicted_from_an_end_of_text():
    batches = text_batches(12, 4, 6, end=5)
    for step in range(10):
        batch = batches.batch(step)
        assert torch.equal(batch.labels == IGNORED, batch.input_ids == 5)


def test_a_short_split_says_what_to_do():
    text_batches(9, 8, 1)
    with pytest.raises(ValueError, match=r"has 8 tokens, a window needs 9.*data\.sequence_length"):
        text_batches(8, 8, 1)


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="count from 0"):
        text_batches(9, 2, 1).batch(-1)


def test_documents_of_a_window_are_told_apart():
    ids = torch.tensor([[5, 0, 7, 8, 0, 0, 3], [0, 1, 2, 3, 4, 5, 6]])
    expected = [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]  # 0 ends a document, and is of it
    assert document_ids(ids, 0).tolist() == expected
    packed = PackedTokens(
        tokens=np.array([4, 0, 6, 7, 0, 9, 2, 3], dtype=np.uint16), offsets=np.array([0, 8])
    )
    settings = {"sequence_length": 7, "batch_size": 2, "seed": 0, "end_of_text_id": 0}
    batch = TextBatches(packed, pack="isolate", **settings).batch(0)
    assert torch.equal(batch.document_ids, document_ids(batch.input_ids, 0))
    assert TextBatches(packed, **settings).batch(0).document_ids is None
