"""Activation checkpointing by block: the same gradients, fewer activations, no silent cache."""

import pytest
import torch
from transformers.utils import logging

from meanbank.core.context import Context
from meanbank.core.layout import Layout
from tests.conformance.models import MEMORIES, make_model
from tests.model.hf_models import SYSTEMS, gradients, make_system, random_ids

# What flows past a block besides its input: x0, values of other layers, tables that layers share.
SOURCES = ["bank", "bank_shared", "first_layer", "mixed_first_layer", "mixed_initial_embedding"]
PAIRS = [*((memory, "mixed_first_layer") for memory in MEMORIES), *(("full", s) for s in SOURCES)]

AUTOCAST = [
    ("kvm_power_law", "mixed_first_layer"),
    ("kvm_power_law", "bank"),
    ("ovq", "first_layer"),
    ("rwkv7", "mixed_first_layer"),
    ("sliding_window", "mixed_initial_embedding"),
]


@pytest.fixture(autouse=True)
def each_warning_anew(monkeypatch):
    logging.get_logger("meanbank").warning_once.cache_clear()


@pytest.mark.parametrize(
    ("memory", "source", "autocast"),
    [*((*pair, False) for pair in PAIRS), *((*pair, True) for pair in AUTOCAST)],
)
def test_the_same_gradients(memory, source, autocast):
    model, ids = make_model(memory, source, "grouped", torch.float32).train(), random_ids(2, 19)
    expected = gradients(model, ids, autocast, use_cache=False)
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    found = gradients(model, ids, autocast, use_cache=False)
    assert found.keys() == expected.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing


def saved_bytes(model, ids) -> int:
    """Bytes that the backward pass will read, parameters aside."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids, use_cache=False)
    assert output.logits.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("system", SYSTEMS)
def test_fewer_activations_are_kept(system):
    model, ids = make_system(system).train(), random_ids(2, 64)
    plain = saved_bytes(model, ids)
    model.activation_checkpointing_enable()
    assert saved_bytes(model, ids) < 0.3 * plain
    model.activation_checkpointing_enable(every_n_layers=2)
    assert 0.3 * plain < saved_bytes(model, ids) < 0.9 * plain


def test_training_begins_no_cache_and_says_so(caplog):
    model, ids = make_system("kvm_bank").train(), random_ids(2, 9)
    model.activation_checkpointing_enable()
    logging.enable_propagation()
    with caplog.at_level("WARNING"):
        assert model(ids, use_cache=True).cache is None
    logging.disable_propagation()
    assert "begins no cache" in caplog.text
    with torch.inference_mode():  # nothing is checkpointed, so there is one
        assert model(ids).cache is not None
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 13)
    assert model.eval()(ids).cache is not None


@pytest.mark.parametrize("system", SYSTEMS)
def test_gradients_through_a_given_cache(system):
    """States are never changed in place, so a block that runs again reads what it read before."""
    model, ids = make_system(system).train(), random_ids(2, 21)
    found = []
    for enable in (model.activation_checkpointing_enable, model.activation_checkpointing_disable):
        enable()
        model.zero_grad()
        first = model(ids[:, :11], cache=model.model.new_cache())
        second = model(ids[:, 11:], cache=first.cache)
        (first.logits.square().sum() + second.logits.square().sum()).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_re_entrant_checkpoints_are_refused():
    model = make_system("kvm_bank").train()
    with pytest.raises(ValueError, match="use_reentrant=True does not apply"):
        model.activation_checkpointing_enable({"use_reentrant": True})
    assert not model.is_activation_checkpointing
    for settings in (None, {}, {"preserve_rng_state": False}, {"use_reentrant": False}):
        model.activation_checkpointing_enable(settings)
        assert model.model.layers[0]._gradient_checkpointing_func.keywords["use_reentrant"] is False
    with pytest.warns(FutureWarning):  # the older name
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_activation_checkpointing


def test_a_context_moves_to_another_device():
    """As libraries that spread the blocks over devices ask of every argument."""
    x = torch.ones(1, 3, 4)
    context = Context(random_ids(1, 3), x, Layout.uniform(1, 0, 3), shared_table=x[0])
    moved = context.publish(0, x).to("meta")
    assert {moved.token_ids.device.type, moved.embedding.device.type} == {"meta"}
    assert moved.first_values[0].is_meta
    assert moved.shared_table.is_meta
    assert moved.layout == context.layout
