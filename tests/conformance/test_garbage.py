"""What a call replaces is free when it returns: no tensor waits for Python's garbage collector.

A cycle of references would keep a replaced cache for as long as few Python objects are made, which
on a GPU, where little happens in Python, is long.
"""

import contextlib
import gc

import pytest
import torch
from torch import Tensor

from meanbank import MeanbankCache, batch_invariant
from tests.conformance.models import MEMORIES, SOURCES, make_model
from tests.conformance.test_rollback import feed, recording, small


@contextlib.contextmanager
def no_tensors_left():
    """Fail if the body leaves tensors that only the garbage collector would free."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [tuple(item.shape) for item in gc.garbage if isinstance(item, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def use(memory, path):
    """Read, forget, look, save, take up again, select and join."""
    model, ids = small(memory), torch.arange(40).remainder(13).view(2, 20)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    cache = recording(model, 4)
    for start in range(0, 20, 5):
        feed(model, cache, ids[:, start : start + 5])
        feed(model, cache, ids[:, start : start + 1])
    cache.crop(-3)
    feed(model, cache, ids, attention_mask=mask)
    assert cache.nbytes() and cache.describe()
    cache.save(path, model)
    cache.restore(path, model)
    joined = MeanbankCache.join([cache.select([1]), cache.repeat(2)])
    with batch_invariant():
        feed(model, joined, ids[:1, :3].repeat(5, 1))


def test_caches(tmp_path):
    with no_tensors_left():
        for memory in [*MEMORIES, "hybrid"]:
            use(memory, tmp_path / f"{memory}.ctx")


def step(model, ids):
    model(ids, labels=ids).loss.backward()
    model.zero_grad()


def test_training():
    ids = torch.randint(40, (2, 20))
    pairs = [(memory, "bank") for memory in MEMORIES]
    pairs += [("kvm_fixed", source) for source in SOURCES]
    with no_tensors_left():
        for memory, source in pairs:
            step(make_model(memory, source, "heads", torch.float32), ids)


def test_the_check_sees_a_cycle():
    with pytest.raises(AssertionError), no_tensors_left():
        loop: list = [torch.zeros(3)]
        loop.append(loop)
        del loop
