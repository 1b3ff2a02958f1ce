"""Associative recall: the labels are the stored values, and batches depend on seed and step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanbank.core.config import build
from meanbank.data.batches import IGNORED
from meanbank.data.recall import RecallBatches, RecallConfig, Stage, recall_batch

CONFIG = RecallConfig()
FIRST_FILLER = CONFIG.keys + CONFIG.values


def batch_of(length: int, pairs: int, seed: int = 0, rows: int = 4):
    generator = torch.Generator().manual_seed(seed)
    return recall_batch(generator, rows, length, pairs, CONFIG)


@given(st.integers(1, 64), st.integers(0, 60), st.integers(0, 10**6))
def test_labels_are_the_stored_values(pairs: int, spare: int, seed: int):
    queries = min(CONFIG.queries, pairs)
    length = 2 * pairs + queries + spare
    batch = batch_of(length, pairs, seed)
    assert batch.input_ids.shape == batch.labels.shape == (4, length)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    body = length - queries
    for tokens, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        keys = [p for p in range(body) if tokens[p] < CONFIG.keys]
        stored = {tokens[p]: tokens[p + 1] for p in keys}
        assert all(p % 2 == 0 and p + 1 < body for p in keys)
        assert len(stored) == len(keys) == pairs
        assert all(CONFIG.keys <= value < FIRST_FILLER for value in stored.values())
        fillers = [t for p, t in enumerate(tokens[:body]) if p not in keys and p - 1 not in keys]
        assert all(FIRST_FILLER <= token < CONFIG.vocab_size for token in fillers)
        assert labels[:body] == [IGNORED] * body
        assert len(set(tokens[body:])) == queries
        assert labels[body:] == [stored[key] for key in tokens[body:]]


@pytest.mark.parametrize(
    ("length", "pairs"), [(32, 4), (64, 8), (128, 12), (128, 24), (512, 48), (1024, 12)]
)
def test_the_settings_of_the_curriculum_and_of_evaluation_fit(length: int, pairs: int):
    labels = batch_of(length, pairs).labels
    assert (labels != IGNORED).sum(dim=1).tolist() == [min(12, pairs)] * 4


@pytest.mark.parametrize("length", [128, 512])
def test_pairs_and_queries_lie_anywhere(length: int):
    batch = batch_of(length, 12, rows=2000)
    inputs = batch.input_ids[:, : length - 12]
    counts = (inputs < CONFIG.keys).sum(dim=0)
    even = counts[0:-1:2].float()
    assert counts[1::2].sum() == 0
    assert (even - even.mean()).abs().max() < 6 * even.mean().sqrt()
    asked = batch.input_ids[:, -12:].flatten().bincount(minlength=CONFIG.keys)[: CONFIG.keys]
    assert asked.min() > 0.7 * asked.float().mean()


@pytest.mark.parametrize(
    ("length", "pairs", "message"),
    [(32, 11, "do not fit in 32 tokens, only 10"), (512, 65, "from 1 to 64"), (32, 0, "from 1")],
)
def test_too_many_pairs_are_refused(length: int, pairs: int, message: str):
    with pytest.raises(ValueError, match=message):
        batch_of(length, pairs)


@given(st.integers(0, 10**9), st.lists(st.integers(0, 99), max_size=6))
def test_a_batch_depends_on_seed_and_step_only(seed: int, steps: list[int]):
    used = RecallBatches(CONFIG, batch_size=3, seed=seed, steps=100)
    for step in steps:
        fresh = RecallBatches(CONFIG, batch_size=3, seed=seed, steps=100).batch(step)
        assert torch.equal(used.batch(step).input_ids, fresh.input_ids)
        assert torch.equal(used.batch(step).labels, fresh.labels)


def test_steps_and_seeds_differ():
    batches = RecallBatches(CONFIG, batch_size=3, seed=0, steps=100)
    other = RecallBatches(CONFIG, batch_size=3, seed=1, steps=100)
    assert not torch.equal(batches.batch(0).input_ids, batches.batch(1).input_ids)
    assert not torch.equal(batches.batch(0).input_ids, other.batch(0).input_ids)


def test_the_curriculum_follows_its_fractions():
    batches = RecallBatches(CONFIG, batch_size=2, seed=0, steps=500)
    lengths = [batches.stage(step).length for step in range(500)]
    assert lengths == [32] * 150 + [64] * 100 + [128] * 250
    assert batches.batch(149).input_ids.shape == (2, 32)
    assert batches.batch(600).input_ids.shape == (2, 128)


@given(st.integers(1, 11), st.integers(1, 24), st.integers(0, 40), st.integers(0, 10**6))
def test_repeated_filler_repeats_between_the_pairs(period, pairs, spare, seed):
    config = RecallConfig(period=period)
    length = 2 * pairs + min(12, pairs) + spare
    generator = torch.Generator().manual_seed(seed)
    batch = recall_batch(generator, 3, length, pairs, config, "repeated")
    for tokens in batch.input_ids.tolist():
        once: dict[int, int] = {}
        for position, token in enumerate(tokens[: length - min(12, pairs)]):
            if token >= FIRST_FILLER:
                assert once.setdefault(position % period, token) == token


def test_batches_of_a_stage_draw_their_pairs_and_take_turns_in_filler():
    stage = Stage(fraction=1.0, length=64, pairs=(1, 4, 9), filler=("diverse", "repeated"))
    config = RecallConfig(curriculum=(stage,), fillers=1000)
    batches = RecallBatches(config, batch_size=2, seed=0, steps=300)
    found = {1: 0, 4: 0, 9: 0}
    for step in range(300):
        tokens = batches.batch(step).input_ids
        pairs = int((tokens[0] < config.keys).sum() - (batches.batch(step).labels[0] >= 0).sum())
        found[pairs] += 1
        fillers = tokens[0][tokens[0] >= FIRST_FILLER]
        assert (len(fillers.unique()) <= config.period) == bool(step % 2)
    assert min(found.values()) > 70


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"queries": 0}, "recall.queries"),
        ({"period": 0}, "recall.period"),
        ({"curriculum": []}, "at least one stage"),
        ({"curriculum": [{"fraction": 1.0, "length": 32, "pairs": []}]}, "one number of pairs"),
        ({"curriculum": [{"fraction": 0.5, "length": 32, "pairs": [4]}]}, "sum 1"),
        (
            {
                "curriculum": [
                    {"fraction": 1.5, "length": 32, "pairs": [4]},
                    {"fraction": -0.5, "length": 64, "pairs": [8]},
                ]
            },
            "positive",
        ),
        ({"curriculum": [{"fraction": 1.0, "length": 32, "pairs": [4, 30]}]}, "do not fit"),
        ({"curriculum": [{"fraction": 1.0, "length": 32, "pairs": [4], "filler": ["x"]}]}, "diver"),
        ({"keys": 4}, "distinct keys"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build(RecallConfig, settings)
