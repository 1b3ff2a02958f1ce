"""Every memory x every value source x both backbones passes one list."""

import itertools

import pytest
import torch

from meanbank import MeanbankForCausalLM
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

LENGTH = 6 * CHUNK + 3


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
    check_bytes(model, ids)
    check_gradients(model, ids)
    check_saving(model, ids, logits, tmp_path)


def check_causality(model, ids, logits):
    """Nothing before a changed token moves in any bit; the token itself does."""
    position = LENGTH // 2
    changed = ids.clone()
    changed[:, position] = (changed[:, position] + 1) % 40
    after = model(changed, use_cache=False).logits
    assert torch.equal(after[:, :position], logits[:, :position])
    assert not torch.equal(after[:, position], logits[:, position])


def check_continuation(model, ids, logits):
    whole = read(model, ids, [LENGTH])
    assert (whole[0] - logits).abs().max() <= 1e-12
    assert_same(read(model, ids, [1] * LENGTH), whole, 1e-10)
    assert_same(read(model, ids, [CHUNK - 1, CHUNK + 2, LENGTH - 2 * CHUNK - 1]), whole, 1e-10)


def check_bytes(model, ids):
    """A state holds what it says, and reaches the closed form without passing it."""
    cache = None
    with torch.inference_mode():
        for part in ids.split([LENGTH - 2, 1, 1], dim=1):
            cache = model(part, cache=cache, use_cache=True).cache
            held, bound = cache.nbytes(), model.model.memory_nbytes_max(cache.seen, batch=2)
            assert held <= bound
            assert held == storage_nbytes(layer.state for layer in cache.layers)


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
