"""Text batches: labels, coverage, resuming at any step."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanbank.data.batches import IGNORED, Batch, TextBatches, document_ids
from meanbank.data.packed import PackedTokens, ShardedTokens
from meanbank.data.recall import RecallBatches, RecallConfig
from meanbank.data.windows import Turns, left_out


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


def corpus(lengths: list[int], first: int = 1, shard: int = 1000) -> PackedTokens:
    """Documents of such lengths, an end-of-text 0 included; their tokens count on from `first`."""
    tokens = np.arange(first, first + sum(lengths))
    offsets = np.cumsum([0, *lengths])
    tokens[offsets[1:] - 1] = 0
    shards = [tokens[start : start + shard] for start in range(0, len(tokens), shard)]
    return PackedTokens(tokens=ShardedTokens(shards), offsets=offsets)


def equal(one: Batch, other: Batch) -> bool:
    pairs = [(one.input_ids, other.input_ids), (one.labels, other.labels)]
    if one.document_ids is not None:
        pairs.append((one.document_ids, other.document_ids))
    return all(torch.equal(*pair) for pair in pairs)


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=9).map(lambda drawn: [9, *drawn])


@given(lengths, st.integers(1, 8), st.integers(1, 20), st.integers(0, 40), st.integers(0, 9))
def test_windows_cross_shards(documents: list[int], length: int, shard: int, step: int, seed: int):
    settings = {"sequence_length": length, "batch_size": 3, "seed": seed, "end_of_text_id": 0}
    for pack in ("stream", "isolate", "document"):
        whole = TextBatches(corpus(documents), pack=pack, **settings)
        cut = TextBatches(corpus(documents, shard=shard), pack=pack, **settings)
        assert equal(whole.batch(step), cut.batch(step))


@given(lengths, st.integers(1, 8), st.integers(0, 3), st.integers(0, 10**6))
def test_rows_are_pieces_of_one_document(documents: list[int], length: int, epoch: int, seed: int):
    packed = corpus(documents)
    batches = TextBatches(
        packed, sequence_length=length, batch_size=1, seed=seed, end_of_text_id=0, pack="document"
    )
    rows = batches.windows[0].per_epoch
    assert rows == sum((tokens - 1) // length for tokens in documents)
    seen: list[int] = []
    of_token = np.repeat(np.arange(len(documents)), documents)  # token t is at place t - 1
    for row in range(rows):
        batch = batches.batch(epoch * rows + row)
        assert batch.document_ids is None
        inputs, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
        assert inputs == list(range(inputs[0], inputs[0] + length))  # so no 0, too
        assert len(set(of_token[np.array(inputs) - 1])) == 1
        ends = packed.offsets[of_token[inputs[0] - 1] + 1] == inputs[-1] + 1
        assert labels == [*inputs[1:], 0 if ends else inputs[-1] + 1]
        seen += inputs
    assert len(set(seen)) == len(seen) == rows * length
    dropped = left_out(packed, length)
    assert dropped["tokens"] == sum(documents) - len(documents) - len(seen)
    assert dropped["documents"] == sum(tokens < length + 1 for tokens in documents)


def test_every_place_of_a_document_comes_up():
    batches = TextBatches(
        corpus([8]), sequence_length=5, batch_size=1, seed=0, end_of_text_id=0, pack="document"
    )
    assert {batches.batch(step).input_ids[0, 0].item() for step in range(40)} == {1, 2, 3}


def test_documents_that_are_all_too_short_are_told():
    with pytest.raises(ValueError, match=r"no document has the 9 tokens .*, the longest has 8"):
        TextBatches(
            corpus([8, 3]),
            sequence_length=8,
            batch_size=1,
            seed=0,
            end_of_text_id=0,
            pack="document",
        )


turns = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(turns, st.integers(1, 7), st.integers(0, 10**6))
def test_sources_come_in_exact_proportions(counts: list[int], rows: int, seed: int):
    """Each cycle has every source's turns, and each source runs through its own epochs."""
    sources = [corpus([40], first=1 + 1000 * number) for number in range(len(counts))]
    settings = {"sequence_length": 7, "seed": seed, "end_of_text_id": 0}
    batches = TextBatches(sources, turns=counts, batch_size=rows, **settings)
    cycle, cycles = sum(counts), 12
    steps = -(-cycle * cycles // rows)
    inputs = torch.cat([batches.batch(step).input_ids for step in range(steps)])
    which = inputs.max(dim=1).values // 1000
    for start in range(0, cycle * cycles, cycle):
        assert which[start : start + cycle].bincount(minlength=len(counts)).tolist() == counts
    for number, windows in enumerate(batches.windows):
        own = inputs[: cycle * cycles][which[: cycle * cycles] == number]
        assert len(own) == cycles * counts[number]
        expected = windows.tokens(np.arange(len(own)))[:, :-1]
        assert own.tolist() == expected.tolist()
    fresh = TextBatches(sources, turns=counts, batch_size=rows, **settings)
    assert equal(fresh.batch(steps - 1), batches.batch(steps - 1))


def test_cycles_and_sources_have_orders_of_their_own():
    sources = [corpus([500], first=1), corpus([500], first=1001)]
    settings = {"sequence_length": 5, "batch_size": 8, "seed": 0, "end_of_text_id": 0}
    batches = TextBatches(sources, turns=[4, 4], **settings)
    which = {
        tuple((batches.batch(step).input_ids.max(dim=1).values > 1000).tolist())
        for step in range(10)
    }
    assert len(which) > 5
    first, second = (windows.starts(np.arange(50)) for windows in batches.windows)
    assert not np.array_equal(first, second)
    with pytest.raises(ValueError, match="2 sources need as many turns"):
        TextBatches(sources, **settings)


def parts_of(rows: int) -> st.SearchStrategy[list[int]]:
    """Any way to cut `rows` rows into parts, for ranks and accumulation."""
    return st.sets(st.integers(1, rows - 1)).map(lambda cuts: [0, *sorted(cuts), rows])


@given(parts_of(8), st.integers(0, 30), st.sampled_from(["stream", "isolate", "document"]))
def test_the_rows_of_all_ranks_are_the_batch(cuts: list[int], step: int, pack: str):
    text = TextBatches(
        [corpus([9, 4, 20]), corpus([11, 30], first=1001)],
        sequence_length=6,
        batch_size=8,
        seed=1,
        end_of_text_id=0,
        pack=pack,
        turns=[2, 1],
    )
    recall = RecallBatches(RecallConfig(), batch_size=8, seed=1, steps=30)
    for batches in (text, recall):
        whole = batches.batch(step)
        for start, stop in pairwise(cuts):
            part = batches.rows(step, start, stop - start)
            assert len(part.input_ids) == stop - start
            assert equal(part, whole.rows(start, stop - start))


@pytest.mark.parametrize("rows", [(-1, 2), (0, 0), (7, 2), (8, 1)])
def test_rows_that_a_batch_does_not_have(rows: tuple[int, int]):
    for batches in (
        text_batches(100, 5, 8),
        RecallBatches(RecallConfig(), batch_size=8, seed=1, steps=30),
    ):
        with pytest.raises(ValueError, match="a batch of 8 rows has no"):
            batches.rows(0, *rows)


def test_threads_share_the_turns_of_sources():
    """Each asks for windows of other cycles at the same time."""
    counts, windows = [7, 2, 1], [np.arange(start, start + 40) for start in range(0, 400, 10)]
    wanted = [Turns(counts, seed=3)(each) for each in windows]
    shared, before = Turns(counts, seed=3), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(shared, windows * 5))
    finally:
        sys.setswitchinterval(before)
    for ours, theirs in zip(found, wanted * 5, strict=True):
        assert all(map(np.array_equal, ours, theirs))
