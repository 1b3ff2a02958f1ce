"""Batches made ahead are the batches, in order; parts of a batch are its rows."""

import itertools
import threading

import pytest
import torch

from meanbank.data import IGNORED, Batch, RecallBatches, RecallConfig
from meanbank.data.ahead import batches_ahead


class Numbers:
    """Batches that hold their step, and who made them."""

    def __init__(self, fails_at=None):
        self.made, self.threads, self.fails_at = [], set(), fails_at

    def batch(self, step):
        if step == self.fails_at:
            raise ValueError(f"no batch {step}")
        self.made.append(step)
        self.threads.add(threading.current_thread())
        ids = torch.full((1, 1), step)
        return Batch(input_ids=ids, labels=ids)


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_workers_change_nothing(workers):
    found = batches_ahead(Numbers(), range(3, 40), workers)
    assert [batch.input_ids.item() for batch in found] == list(range(3, 40))
    recall = RecallBatches(RecallConfig(), batch_size=2, seed=0, steps=12)
    for step, batch in enumerate(batches_ahead(recall, range(12), workers)):
        assert torch.equal(batch.input_ids, recall.batch(step).input_ids)


def test_no_more_than_two_a_worker_are_ahead_and_none_is_left():
    numbers = Numbers()
    found = batches_ahead(numbers, range(100), 3)
    for _ in range(10):
        next(found)
    found.close()
    assert set(range(10)) <= set(numbers.made)
    assert max(numbers.made) <= 9 + 6
    assert threading.main_thread() not in numbers.threads
    assert not any(thread.is_alive() for thread in numbers.threads)


def test_without_workers_a_batch_is_made_when_it_is_asked_for():
    numbers = Numbers()
    list(itertools.islice(batches_ahead(numbers, range(100), 0), 4))
    assert numbers.made == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_goes_wrong_is_told_at_its_step(workers):
    found = batches_ahead(Numbers(fails_at=3), range(10), workers)
    assert [next(found).input_ids.item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no batch 3"):
        next(found)


def test_parts_are_the_rows_in_order():
    ids = torch.arange(14).reshape(7, 2)
    labels = ids.masked_fill(ids % 3 == 0, IGNORED)
    batch = Batch(input_ids=ids, labels=labels, document_ids=ids % 2)
    assert batch.targets == 14 - 5
    parts = batch.parts(3)
    assert [len(part.input_ids) for part in parts] == [3, 2, 2]
    assert sum(part.targets for part in parts) == batch.targets
    for name in ("input_ids", "labels", "document_ids"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(batch, name))
    assert batch.parts(1)[0].document_ids is not None
    assert Batch(input_ids=ids, labels=labels).parts(2)[1].document_ids is None
