"""Shorter rows at first: the same tokens a step, cut into more rows."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanbank.data import DataConfig, LengthStage, RecallBatches, RecallConfig, TextBatches
from meanbank.data.ahead import batches_ahead
from meanbank.data.batches import IGNORED, document_ids
from meanbank.data.stages import BatchStage, stage_at, stage_ends
from tests.data.test_batches import corpus, equal, parts_of, text_batches

LENGTH, ROWS, END = 12, 2, 0
SOURCES = [corpus([9, 14, 20, 13, 40]), corpus([11, 30, 16], first=1001)]
PACKS = st.sampled_from(["stream", "isolate", "document"])
cuts = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3, 4, 6, 12])), min_size=1, max_size=4
)


def shapes(drawn: list[tuple[int, int]]) -> list[BatchStage]:
    """Stages of (steps, tokens a row), the full length last."""
    return [
        BatchStage(steps=steps, rows=ROWS * LENGTH // length, length=length)
        for steps, length in [*drawn, (3, LENGTH)]
    ]


def batches(stages: list[BatchStage], pack: str, seed: int = 0) -> TextBatches:
    return TextBatches(
        SOURCES, turns=[2, 1], sequence_length=LENGTH, batch_size=ROWS, seed=seed,
        end_of_text_id=END, pack=pack, stages=stages,
    )  # fmt: skip


@given(cuts, PACKS, st.integers(0, 9))
def test_a_step_has_its_tokens_in_rows_of_its_stage(drawn, pack: str, seed: int):
    stages = shapes(drawn)
    staged, plain = batches(stages, pack, seed), batches([], pack, seed)
    wanted = [stage for stage in stages for _ in range(stage.steps)] + 2 * [stages[-1]]
    for step, stage in enumerate(wanted):  # two more than the run has
        batch, whole = staged.batch(step), plain.batch(step)
        assert staged.rows_at(step) == stage.rows
        assert batch.input_ids.shape == batch.labels.shape == (stage.rows, stage.length)
        assert batch.input_ids.numel() == ROWS * LENGTH
        # So sources, epochs and what they leave out are those of a run without stages.
        assert torch.equal(batch.input_ids.flatten(), whole.input_ids.flatten())
        assert torch.equal(batch.labels.flatten(), whole.labels.flatten())
        if pack == "isolate":
            assert batch.document_ids is not None
            assert torch.equal(batch.document_ids, document_ids(batch.input_ids, END))
        else:
            assert batch.document_ids is None


def test_rows_are_pieces_of_windows_in_order():
    """By hand: tokens count on, so a window from 31 on gives 31.., 35.., 39..."""
    stages = [BatchStage(steps=1, rows=3, length=4), BatchStage(steps=1, rows=1, length=12)]
    first = TextBatches(
        corpus([60]), sequence_length=12, batch_size=1, seed=3, end_of_text_id=END, stages=stages
    ).batch(0)
    start = int(text_batches(60, 12, 1, seed=3).batch(0).input_ids[0, 0])
    tokens = [[start + 4 * row + column for column in range(5)] for row in range(3)]
    ring = [[t if t <= 60 else t - 60 for t in row] for row in tokens]
    ends = [[0 if t == 60 else t for t in row] for row in ring]
    assert first.input_ids.tolist() == [row[:4] for row in ends]
    labels = [[IGNORED if t == 0 else after for t, after in pairwise(row)] for row in ends]
    assert first.labels.tolist() == labels


@given(cuts, PACKS, st.integers(0, 12), st.data())
def test_any_rows_are_those_of_the_batch(drawn, pack: str, step: int, data: st.DataObject):
    staged = batches(shapes(drawn), pack)
    rows = staged.rows_at(step)
    whole = staged.batch(step)
    for start, stop in pairwise(data.draw(parts_of(rows))):
        assert equal(staged.rows(step, start, stop - start), whole.rows(start, stop - start))
    with pytest.raises(
        ValueError, match=f"a batch of {rows} rows has no 1 rows from row {rows} on"
    ):
        staged.rows(step, rows, 1)


@given(cuts, PACKS, st.integers(0, 3), st.lists(st.integers(0, 9), max_size=4))
def test_order_is_that_of_steps_whoever_makes_them(drawn, pack, workers, before):
    used, stages = batches(shapes(drawn), pack), shapes(drawn)
    for step in before:
        used.batch(step)
    resumed = sum(before) % 7
    found = list(batches_ahead(used, range(resumed, 9), workers))
    for step, batch in enumerate(found, start=resumed):
        assert equal(batch, batches(stages, pack).batch(step))


def test_an_epoch_leaves_out_no_more():
    """Five windows of 12 from 70 tokens: 60 different ones, whatever the stages."""
    stages = shapes([(1, 3), (1, 4)])
    staged = TextBatches(
        corpus([70]), sequence_length=LENGTH, batch_size=1, seed=5, end_of_text_id=END,
        stages=[dataclasses.replace(stage, rows=stage.rows // ROWS) for stage in stages],
    )  # fmt: skip
    inputs = np.concatenate([staged.batch(step).input_ids.flatten() for step in range(5)])
    assert len(inputs) == len(set(inputs.tolist())) == 60


def test_ends_of_stages():
    assert stage_ends([0.3, 0.2, 0.5], 10) == [3, 5, 10]
    assert stage_ends([0.5, 0.5], 1) == [0, 1]  # the first has no step
    assert [stage_at([3, 5, 10], step) for step in (0, 2, 3, 4, 5, 9, 10, 99)] == [
        0, 0, 1, 1, 2, 2, 2, 2
    ]  # fmt: skip


def staged(*lengths: int, **changes) -> DataConfig:
    stages = [LengthStage(fraction=1 / len(lengths), length=length) for length in lengths]
    return DataConfig(**{"sequence_length": 512, "batch_size": 3} | changes
                      | {"sequence_lengths": tuple(stages)})  # fmt: skip


def test_shapes_of_a_configuration():
    shape = [(of.steps, of.rows, of.length) for of in staged(128, 256, 512).stages(10)]
    assert shape == [(3, 12, 128), (4, 6, 256), (3, 3, 512)]
    assert [of.tokens for of in staged(64, 512).stages(4)] == [3072, 3072]
    assert DataConfig().stages(7) == (BatchStage(steps=7, rows=8, length=512),)
    recall = DataConfig(source="recall", batch_size=5)
    assert [(of.steps, of.rows, of.length) for of in recall.stages(10)] == [
        (3, 5, 32), (2, 5, 64), (5, 5, 128)
    ]  # fmt: skip
    assert RecallBatches(RecallConfig(), batch_size=5, seed=0, steps=10).rows_at(9) == 5


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((200, 512), r"must divide data\.sequence_length \(512\), got 200; the nearest .* is 256"),
        ((0, 512), "got 0; the nearest that does is 1"),
        ((1024, 512), "got 1024; the nearest that does is 512"),
        ((128, 256), r"last length .* must be data\.sequence_length \(512\), got 256"),
    ],
)
def test_wrong_lengths_say_what_to_do(lengths, message):
    with pytest.raises(ValueError, match=message) as error:
        staged(*lengths)
    assert "\n" not in str(error.value)


def test_wrong_fractions_and_sources():
    stage = LengthStage(fraction=0.5, length=512)
    with pytest.raises(ValueError, match=r"fractions of data\.sequence_lengths must .* sum 1"):
        DataConfig(sequence_lengths=(stage,))
    with pytest.raises(ValueError, match=r"data\.sequence_lengths is for text"):
        staged(512, source="recall")
