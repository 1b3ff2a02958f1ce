"""Every memory x every value source x both backbones passes one list."""

import itertools

import pytest
import torch

from meanbank import MeanbankForCausalLM
from meanbank.memory import MemoryConfig
from meanbank.values import ValueSourceConfig
from tests.conformance.models import (
    BACKBONES,
    CHUNK,
    MEMORIES,
    SOURCES,
    assert_same,
    make_model,
    read,
    storage_nbytes,
)

LENGTH = 7 * CHUNK  # where windows are full


@pytest.mark.parametrize(
    ("memory", "source", "backbone"), list(itertools.product(MEMORIES, SOURCES, BACKBONES))
)
def test_the_list(memory, source, backbone, tmp_path):
    model = make_model(memory, source, "grouped", torch.float64, layers=2, backbone=backbone)
    ids = torch.randint(40, (2, LENGTH))
    logits = model(ids, use_cache=False).logits
    assert logits.shape == (2, LENGTH, 40)
    check_causality(model, ids, logits)
    check_continuation(model, ids, logits)
    check_gradients(model, ids)
    check_saving(model, ids, logits, tmp_path)


def test_every_memory_and_source_has_a_row():
    assert {settings["type"] for settings in MEMORIES.values()} == set(MemoryConfig.family)
    assert {settings["type"] for settings in SOURCES.values()} == set(ValueSourceConfig.family)


def check_causality(model, ids, logits):
    """Nothing before a changed token moves in any bit; the token itself does."""
    position = LENGTH // 2
    changed = ids.clone()
    changed[:, position] = (changed[:, position] + 1) % 40
    after = model(changed, use_cache=False).logits
    assert torch.equal(after[:, :position], logits[:, :position])
    assert not torch.equal(after[:, position], logits[:, position])


def check_continuation(model, ids, logits):
    """One pass, pieces and token by token are the same, logits and states."""
    whole = read(model, ids, [LENGTH])
    assert (whole[0] - logits).abs().max() <= 1e-12
    assert_same(read(model, ids, [CHUNK - 1, CHUNK + 2, LENGTH - 2 * CHUNK - 1]), whole, 1e-10)
    assert_same(token_by_token(model, ids), whole, 1e-10)


def token_by_token(model, ids):
    """Logits and states; at every length the cache holds the storage that it says it does.

    It never passes the closed form, and reaches it.
    """
    cache, logits, largest, bound = None, [], 0, 0
    with torch.inference_mode():
        for token in ids.split(1, dim=1):
            output = model(token, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
            held, bound = cache.nbytes(), model.model.memory_nbytes_max(cache.seen, batch=2)
            assert held <= bound
            prepared = cache.prepared_nbytes()
            assert held + prepared == storage_nbytes(layer.state for layer in cache.layers)
            largest = max(largest, held)
        whole = model(ids, use_cache=True).cache
        assert whole.nbytes() == storage_nbytes(layer.state for layer in whole.layers)
    sources = [plan.values for plan in model.config.plans()]
    if all(getattr(values, "scale", None) != "fixed" for values in sources):
        assert largest == bound  # otherwise two layers may hold one tensor
    return torch.cat(logits, dim=1), [layer.state for layer in cache.layers]


def check_gradients(model, ids):
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if "layers.0.attention.values.residual" not in name:  # a no-op there by definition
            assert parameter.grad.abs().max() > 0, name
    model.zero_grad()
    model.eval()


def check_saving(model, ids, logits, folder):
    model.save_pretrained(folder)
    again = MeanbankForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert (again(ids, use_cache=False).logits - logits).abs().max() <= 1e-12
