"""Any split, any heads, any precision: what one pass gives, every other way of reading gives."""

import itertools

import pytest
import torch

from tests.conformance.models import HEADS, MEMORIES, SOURCES, assert_same, make_model, read

SOME = ["projection", "bank", "first_layer"]
PAIRS = {
    *itertools.product(MEMORIES, SOME, ["grouped"]),
    *itertools.product(["full", "block_window_sink", "kvm_power_law", "ovq"], SOME[:2], HEADS),
}
EARLIEST = [name for name in SOURCES if "first_layer" not in name]
REFERRING = ["projection_gated", "projection_linear", "first_layer", "mixed_first_layer"]


@pytest.mark.parametrize(("memory", "source", "heads"), sorted(PAIRS))
def test_splits_do_not_matter(memory, source, heads):
    model = make_model(memory, source, heads, torch.float64)
    ids = torch.randint(40, (2, 37))
    whole = read(model, ids, [37])
    assert_same(read(model, ids, [1] * 37), whole, 1e-10)
    for splits in ([3, 4, 5, 25], [8, 8, 8, 8, 5], [15, 1, 1, 17, 3], [36, 1]):
        assert_same(read(model, ids, splits), whole, 1e-10)
    without_cache = model(ids, use_cache=False).logits
    assert (without_cache - whole[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", SOME[:2])
def test_single_precision(memory, source):
    model = make_model(memory, source, "grouped", torch.float32)
    ids = torch.randint(40, (2, 33))
    assert_same(read(model, ids, [1] * 33), read(model, ids, [33]), 1e-5)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", SOME[:2])
def test_rows_of_a_batch_keep_apart(memory, source):
    model = make_model(memory, source, "grouped", torch.float64)
    ids = torch.randint(40, (3, 29))
    together = model(ids, use_cache=False).logits
    for row in range(3):
        alone = model(ids[row : row + 1], use_cache=False).logits
        assert (alone[0] - together[row]).abs().max() <= 1e-12


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", SOME[:2])
def test_memory_stays_within_its_closed_form(memory, source):
    model = make_model(memory, source, "grouped", torch.float32)
    ids = torch.randint(40, (2, 70))
    cache, largest = None, 0
    with torch.inference_mode():
        for position in range(70):
            cache = model(ids[:, position : position + 1], cache=cache, use_cache=True).cache
            largest = max(largest, cache.nbytes())
            bound = model.model.memory_nbytes_max(position + 1, batch=2)
            assert largest <= bound, f"after {position + 1} tokens"
    # for these settings the bound is tight
    assert largest == model.model.memory_nbytes_max(70, batch=2)


@pytest.mark.parametrize("memory", ["kvm_power_law", "rwkv7"])
@pytest.mark.parametrize("source", EARLIEST)
@pytest.mark.parametrize("others", REFERRING)
def test_any_source_in_the_first_layer(memory, source, others):
    """Later layers read values that the first layer has from anywhere."""
    plan = [
        {"memory": MEMORIES[memory], "values": SOURCES[others]},
        {"where": [0], "values": SOURCES[source]},
    ]
    model = make_model(memory, source, "heads", torch.float64, plan=plan)
    ids = torch.randint(40, (1, 21))
    assert_same(read(model, ids, [1] * 21), read(model, ids, [21]), 1e-10)


@pytest.mark.parametrize("memory", [name for name in MEMORIES if "sliding" not in name])
@pytest.mark.parametrize("source", ["projection", "projection_scaled", "initial_embedding"])
def test_hybrids_read_the_first_layer_of_their_kind(memory, source):
    """The layer that others read comes second, so that its input is not x0."""
    own = {key: value for key, value in SOURCES["mixed_first_layer"].items() if key != "other"}
    plan = [
        {"memory": {"type": "sliding_window", "window": 5}},
        {"where": [1, 2], "memory": MEMORIES[memory], "values": SOURCES[source]},
        {
            "where": [3],
            "memory": MEMORIES[memory],
            "values": {**own, "other": {"type": "first_layer", "scale": "fixed"}},
        },
    ]
    model = make_model(memory, source, "heads", torch.float64, layers=4, plan=plan)
    assert [place.publishes for place in model.config.places()] == [True, True, False, False]
    ids = torch.randint(40, (1, 21))
    whole = read(model, ids, [21])
    assert_same(read(model, ids, [1] * 21), whole, 1e-10)
    assert_same(read(model, ids, [5, 9, 7]), whole, 1e-10)
    with torch.no_grad():  # layer 3 really reads layer 1
        weight = model.model.layers[1].attention.values.projection.weight
        before = model(ids, use_cache=False).logits
        weight.add_(1.0)
        assert not torch.equal(model(ids, use_cache=False).logits, before)


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "full"])
@pytest.mark.parametrize("source", SOME[:2])
def test_states_do_not_pin_the_prompt(memory, source):
    model = make_model(memory, source, "grouped", torch.float32)
    with torch.inference_mode():
        cache = model(torch.randint(40, (1, 200)), use_cache=True).cache
    for layer in cache.layers:
        for tensor in layer.state.tensors():
            held = tensor.untyped_storage().nbytes()
            assert held <= 2 * tensor.numel() * tensor.element_size(), tensor.shape
