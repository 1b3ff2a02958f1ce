"""Forgetting the last tokens: a cropped cache is one that never saw them, in every tensor."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meanbank import MeanbankCache, batch_invariant
from meanbank.core.state import State
from tests.conformance.models import BACKBONES, CHUNK, MEMORIES, SOURCES, make_model

TOLERANCE = 1e-10  # fp64
DEPTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)
HYBRID = [
    {"memory": {**MEMORIES["kvm_power_law"], "chunk_size": 3, "window_chunks": 1}},
    {"where": [1], "memory": MEMORIES["kvm_saturating"], "values": "bank"},
    {"where": [2], "memory": "rwkv7"},
    {"where": [3], "memory": {**MEMORIES["ovq"], "chunk_size": 5}},
    {"where": [4], "memory": MEMORIES["sliding_window_sink"]},
]


ORDINARY = {"full", "sliding_window_sink", "kvm_power_law", "kvm_one_chunk_no_gate", "ovq", "rwkv7"}
EVERY_MEMORY = [  # the rest with --runslow
    pytest.param(name, marks=[] if name in ORDINARY else pytest.mark.slow)
    for name in [*MEMORIES, "hybrid"]
]


def small(memory, source="bank", backbone="gptalpha2", dtype=torch.float64):
    if memory == "hybrid":
        return make_model("rwkv7", source, "heads", dtype, layers=5, plan=HYBRID)
    return make_model(memory, source, "grouped", dtype, layers=2, backbone=backbone)


def recording(model, tokens=None) -> MeanbankCache:
    cache = model.model.new_cache()
    cache.activate_past_recording(tokens)
    return cache


def fork(cache) -> MeanbankCache:
    """The same cache once more; states are values."""
    again = copy.copy(cache)
    again.layers = [copy.copy(layer) for layer in cache.layers]
    return again


@torch.inference_mode()
def feed(model, cache, ids, **arguments) -> Tensor:
    return model(ids, cache=cache, **arguments).logits


def tensors(cache) -> list[Tensor]:
    return [t for layer in cache.layers if layer.state is not None for t in layer.state.tensors()]


def assert_same(cache, wanted, tolerance=TOLERANCE):
    """Same place, same states, but for what is only kept to forget more tokens."""
    assert (cache.seen, cache.lengths) == (wanted.seen, wanted.lengths)
    cache, wanted = fork(cache), fork(wanted)
    cache.stop_past_recording(), wanted.stop_past_recording()
    assert cache.nbytes() == wanted.nbytes()
    for found, other in zip(tensors(cache), tensors(wanted), strict=True):
        assert found.shape == other.shape
        if tolerance == 0:
            assert torch.equal(found, other)
        else:
            assert (found.double() - other.double()).abs().max() <= tolerance


def assert_refused(cache, tokens):
    """A crop that cannot be done changes nothing."""
    before = [layer.state for layer in cache.layers]
    with pytest.raises(ValueError, match=f"{tokens} tokens cannot be forgotten") as error:
        cache.crop(-tokens)
    assert "\n" not in str(error.value)
    assert all(layer.state is state for layer, state in zip(cache.layers, before, strict=True))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_every_crop_at_every_place(memory, backbone):
    """Token by token, bit for bit: whatever was read after a place leaves no trace."""
    model = small(memory, backbone=backbone)
    ids = torch.randint(40, (2, 20))
    exact = memory not in ("rwkv7", "hybrid")  # those read again, in one go
    depth = CHUNK if backbone == "gptalpha2" else 2 * CHUNK + 1
    plain, cache, never = model.model.new_cache(), recording(model, depth), {}
    for seen in range(1, 21):
        token = ids[:, seen - 1 : seen]
        assert torch.equal(feed(model, cache, token), feed(model, plain, token))
        never[seen] = fork(plain)
        assert cache.undoable == min(depth, seen)
        for tokens in range(cache.undoable + 1):
            cropped = fork(cache)
            cropped.crop(-tokens)
            assert cropped.undoable == cache.undoable - tokens
            assert cropped.is_croppable == (cropped.undoable > 0)
            if tokens < seen:
                assert_same(cropped, never[seen - tokens], 0 if exact else TOLERANCE)
            else:
                assert (cropped.seen, cropped.nbytes()) == (0, 0)
        assert_refused(cache, cache.undoable + 1)
        assert_refused(cache, cache.undoable + 2)


@st.composite
def readings(draw):
    """A depth, the lengths of some calls, and how many tokens are forgotten after each."""
    depth = draw(st.sampled_from(DEPTHS))
    lengths = draw(st.lists(st.integers(1, 2 * CHUNK + 1), min_size=2, max_size=5))
    return depth, [(n, draw(st.integers(0, min(n, depth) + 2))) for n in lengths]


PLACES = [("projection", "gptalpha2"), ("bank", "nanochat"), ("mixed_first_layer", "gptalpha2")]


@pytest.mark.parametrize("memory", EVERY_MEMORY)
@settings(max_examples=5)
@given(reading=readings(), place=st.sampled_from(PLACES))
def test_any_split_and_any_crops(memory, place, reading):
    """Read and forget in turns; then go on, with and without a record, as if nothing had been."""
    depth, turns = reading
    model = small(memory, *place)
    cache, text = recording(model, depth), torch.empty(2, 0, dtype=torch.long)
    for length, wanted in turns:
        new = torch.randint(40, (2, length))
        feed(model, cache, new)
        text = torch.cat([text, new], dim=1)
        if wanted > cache.undoable:
            assert_refused(cache, wanted)
        tokens = min(wanted, cache.undoable)
        cache.crop(-tokens)
        text = text[:, : text.shape[1] - tokens]
        assert cache.seen == text.shape[1]
    never = model.model.new_cache()
    if text.numel():
        feed(model, never, text)
        assert_same(cache, never)
    assert_goes_on(model, cache, never, torch.randint(40, (2, 14)))


def assert_goes_on(model, cache, never, more):
    """The same logits and states further on, and back again."""
    for part in more[:, :13].split([1, CHUNK, 8], dim=1):
        assert (feed(model, cache, part) - feed(model, never, part)).abs().max() <= TOLERANCE
        assert_same(cache, never)
    for layer in cache.layers:  # as transformers turns it off
        layer.record_past = False
    after = feed(model, cache, more[:, 13:14]) - feed(model, never, more[:, 13:14])
    assert after.abs().max() <= TOLERANCE
    assert [t.shape for t in tensors(cache)] == [t.shape for t in tensors(never)]
    assert cache.nbytes() == never.nbytes()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("memory", ["kvm_power_law", "rwkv7", "sliding_window_sink"])
def test_every_source(memory, source):
    model = small(memory, source)
    ids = torch.randint(40, (2, 33))
    cache, never = recording(model, 2 * CHUNK), model.model.new_cache()
    feed(model, cache, ids[:, :14]), feed(model, cache, ids[:, 14:19])
    cache.crop(-7)
    feed(model, never, ids[:, :12])
    assert_same(cache, never)
    assert (feed(model, cache, ids[:, 12:]) - feed(model, never, ids[:, 12:])).abs().max() <= 1e-10


@st.composite
def ragged_calls(draw):
    """Masks (rows, columns) of a few calls, whether each starts documents, and tokens to forget."""
    rows = draw(st.integers(1, 3))
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        columns = draw(st.integers(1, 11))
        bits = draw(st.lists(st.integers(0, 4), min_size=rows * columns, max_size=rows * columns))
        documents = draw(st.lists(st.integers(0, 7), min_size=columns, max_size=columns))
        calls.append((torch.tensor(bits).view(rows, columns) > 0, documents))
    return calls, draw(st.integers(0, 9)), draw(st.integers(0, 9))


@pytest.mark.parametrize(
    "memory", ["kvm_power_law", "kvm_one_chunk_no_gate", "ovq", "rwkv7", "block_window_sink"]
)
@settings(max_examples=10)
@given(reading=ragged_calls())
def test_rows_at_different_places(memory, reading):
    """Padding and documents: each row forgets as many of its own last tokens, within a document."""
    calls, first, second = reading
    model = small(memory)
    cache = recording(model, 7)
    rows = len(calls[0][0])
    texts: list[list[int]] = [[] for _ in range(rows)]  # of the last documents
    last: list[int | None] = [None] * rows  # their ids
    for turn, (mask, documents) in enumerate(calls):
        ids = torch.randint(40, mask.shape)
        numbers = torch.tensor(documents).eq(0).cumsum(0).expand(mask.shape)
        feed(model, cache, ids, attention_mask=mask.long(), document_ids=numbers)
        for row in range(rows):
            held = numbers[row][mask[row]]
            if held.numel():
                goes_on = {int(held[0]), last[row]} <= {int(held[-1]), None}  # not another one
                last[row] = int(held[-1])
                new = ids[row][mask[row]][held == held[-1]].tolist()
                texts[row] = [*texts[row], *new] if goes_on else new
        wanted = second if turn else first
        if wanted > cache.undoable:
            assert_refused(cache, wanted)
        tokens = min(wanted, cache.undoable)
        assert cache.undoable <= min(map(len, texts))
        cache.crop(-tokens)
        texts = [text[: len(text) - tokens] for text in texts]
        assert (cache.lengths or (0,) * rows) == tuple(map(len, texts))
    more = torch.randint(40, (rows, CHUNK + 2))
    assert_rows(model, cache, texts, more)
    again = torch.tensor([rows - 1, *range(rows)])  # as beams do
    cache.reorder_cache(again)
    cache.batch_repeat_interleave(2)
    assert cache.undoable >= CHUNK + 2
    cache.crop(-CHUNK)
    texts = [[*text, *row[:2]] for text, row in zip(texts, more.tolist(), strict=True)]
    twice = again.repeat_interleave(2).tolist()
    assert_rows(model, cache, [texts[at] for at in twice], torch.randint(40, (len(twice), 3)))


def assert_rows(model, cache, texts, more):
    """What each row makes of more tokens is what it makes of them alone."""
    logits = feed(model, cache, more)
    for row, text in enumerate(texts):
        alone = torch.tensor([[*text, *more[row].tolist()]])
        wanted = model(alone, use_cache=False).logits[0, -more.shape[1] :]
        assert (logits[row] - wanted).abs().max() <= TOLERANCE


def columns(ids, lengths):
    """The last lengths[r] of each row's columns are no padding."""
    width = ids.shape[1]
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


@torch.inference_mode()
def feed_ends(model, cache, ids, lengths):
    return model(**columns(ids, lengths), cache=cache).logits


@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_a_document_is_not_forgotten_past_its_start(memory):
    model = small(memory)
    cache, ids = recording(model, 9), torch.randint(40, (2, 19))
    feed(model, cache, ids[:, :12])
    feed(model, cache, ids[:, 12:], document_ids=torch.tensor([[0, 0, 1, 1, 1, 1, 1]] * 2))
    assert cache.undoable == 5
    assert_refused(cache, 6)
    cache.crop(-3)
    assert_rows(model, fork(cache), ids[:, 14:16].tolist(), torch.randint(40, (2, 7)))
    cache.crop(-2)
    assert cache.nbytes() == 0
    assert_rows(model, cache, [[], []], torch.randint(40, (2, 7)))


@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_each_row_forgets_what_is_recorded_of_it(memory):
    """Rows that come to one place by different ways, one with less of a record than the other."""
    model = small(memory)
    cache, ids = model.model.new_cache(), torch.randint(40, (2, 8))
    first = torch.stack([ids[0, :6], torch.cat([ids[1, :3], ids[1, :3]])])
    feed_ends(model, cache, first, (6, 3))
    cache.activate_past_recording(7)
    feed_ends(model, cache, ids[:, 6:8], (2, 0))
    assert not cache.is_croppable
    feed_ends(model, cache, ids[:, 3:8], (0, 5))
    assert cache.lengths == (8, 8)
    assert cache.undoable == 2
    assert_refused(cache, 3)
    apart = fork(cache)
    cache.crop(-2)
    assert_rows(model, cache, ids[:, :6].tolist(), torch.randint(40, (2, 7)))
    apart.batch_select_indices(torch.tensor([1]))
    assert apart.undoable in (2, 5)  # joined with the other row, it may have lost some
    tokens = apart.undoable
    apart.crop(-tokens)
    assert_rows(model, apart, ids[1:, : 8 - tokens].tolist(), torch.randint(40, (1, 7)))


@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_joined_caches_forget_what_all_of_them_can(memory):
    model, ids = small(memory), torch.randint(40, (3, 13))
    first, second = recording(model, 7), recording(model, 5)
    feed(model, first, ids[:2, :4]), feed(model, first, ids[:2, 4:])
    feed(model, second, ids[2:, :11])
    joined = MeanbankCache.join([first, second])
    assert joined.record.undo == joined.undoable == 5
    joined.crop(-5)
    assert_rows(model, joined, [*ids[:2, :8].tolist(), ids[2, :6].tolist()], ids[:, :6])
    assert joined.undoable == 5  # it goes on recording
    alone = MeanbankCache.join([first, model(ids[:1], use_cache=True).cache])
    assert alone.record.undo == 0
    assert_refused(alone, 14)


@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_rows_read_one_by_one_record_too(memory):
    model, ids = small(memory), torch.randint(40, (2, 17))
    cache, never = recording(model, 7), recording(model, 7)
    with batch_invariant():
        feed(model, cache, ids[:, :11]), feed(model, cache, ids[:, 11:14])
        cache.crop(-6)
        feed(model, never, ids[:, :8])
        assert_same(cache, never)
        assert (feed(model, cache, ids[:, 8:]) - feed(model, never, ids[:, 8:])).abs().max() < 1e-10


@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_rows_taken_out_keep_their_own_record(memory):
    model, lengths = small(memory), (9, 2, 5)
    cache, ids = model.model.new_cache(), torch.randint(40, (3, 12))
    feed(model, cache, ids[:, :3])
    cache.activate_past_recording(7)
    feed_ends(model, cache, ids[:, 3:], lengths)
    assert cache.undoable == 2
    for rows, undoable in (([0], 7), ([2], 5), ([2, 0], 5), ([1, 1, 0], 2), ([0, 0], 7)):
        chosen = fork(cache)
        chosen.batch_select_indices(torch.tensor(rows))
        assert chosen.undoable == undoable
        chosen.batch_repeat_interleave(2)
        chosen.crop(-undoable)
        texts = [torch.cat([ids[row, :3], ids[row, 12 - lengths[row] :]]).tolist() for row in rows]
        twice = [text[: len(text) - undoable] for text in texts for _ in range(2)]
        assert_rows(model, chosen, twice, torch.randint(40, (len(twice), 6)))


@pytest.mark.parametrize("memory", EVERY_MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_record_costs(memory, dtype):
    """A record is in the bytes and in their closed form; without one nothing grows."""
    model = small(memory, "projection", dtype=dtype)
    ids = torch.randint(40, (2, 6 * CHUNK))
    plain, cache, largest = model.model.new_cache(), recording(model, CHUNK), 0
    for seen in range(1, ids.shape[1] + 1):
        token = ids[:, seen - 1 : seen]
        feed(model, plain, token), feed(model, cache, token)
        assert cache.nbytes() <= model.model.memory_nbytes_max(seen, 2, CHUNK)
        assert seen == 1 or plain.nbytes() < cache.nbytes()
        largest = max(largest, sum(layer.nbytes() for layer in cache.layers))  # shared ones twice
    if memory != "hybrid":  # whose layers are not at their largest together
        assert largest == model.model.memory_nbytes_max(ids.shape[1], 2, CHUNK)
    cache.stop_past_recording()
    assert cache.nbytes() == plain.nbytes()
    assert cache.undoable == plain.undoable == 0


@pytest.mark.parametrize("memory", EVERY_MEMORY)
def test_what_was_not_recorded_is_not_forgotten(memory):
    model = small(memory)
    ids = torch.randint(40, (2, 30))
    cache = model.model.new_cache()
    feed(model, cache, ids[:, :13])
    assert not cache.is_croppable
    cache.crop(0)
    assert_refused(cache, 1)
    assert_refused(cache, 14)
    cache.activate_past_recording()
    assert cache.record.undo == 256
    feed(model, cache, ids[:, 13:16]), feed(model, cache, ids[:, 16:18])
    assert cache.undoable == 5
    assert_refused(cache, 6)
    with pytest.raises(ValueError, match="minus the number of tokens"):
        cache.crop(1)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        cache.activate_past_recording(0)
    cache.crop(-5)
    never = model.model.new_cache()
    feed(model, never, ids[:, :13])
    assert_same(cache, never)
    assert not cache.is_croppable
    assert_goes_on(model, cache, never, ids[:, 13:])


def test_a_state_that_does_not_say_how_forgets_nothing():
    @dataclasses.dataclass(frozen=True)
    class Sum(State):
        total: Tensor

    state = Sum(torch.ones(1, 2))
    assert state.undoable == 0
    assert torch.equal(state.crop(0).total, state.total)
    with pytest.raises(ValueError, match="Sum has no record"):
        state.crop(1)


def test_depth_follows_the_largest_chunk():
    large = {**MEMORIES["kvm_power_law"], "chunk_size": 300}
    model = make_model("full", "bank", "grouped", torch.float32, plan=[{"memory": large}])
    cache = recording(model)
    assert cache.record.undo == 300
    cache.activate_past_recording(17)
    assert cache.record.undo == 300
    cache.activate_past_recording(500)
    assert cache.record.undo == 500
