"""Every memory with every value source: one pass, any split and token by token are the same."""

import itertools

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.core.state import State

CHUNK = 4
MEMORIES = {
    "full": {"type": "full"},
    "sliding_window": {"type": "sliding_window", "window": 6},
    "sliding_window_sink": {"type": "sliding_window", "window": 6, "sink": 2},
    "block_window": {"type": "block_window", "block_size": CHUNK, "blocks": 2},
    "block_window_sink": {"type": "block_window", "block_size": CHUNK, "blocks": 2, "sink": 3},
    "kvm_fixed": {"type": "kvm", "chunk_size": CHUNK, "budget": {"type": "fixed", "count": 6}},
    "kvm_power_law": {
        "type": "kvm",
        "chunk_size": CHUNK,
        "budget": {"type": "power_law", "factor": 2},
    },
    "kvm_saturating": {
        "type": "kvm",
        "chunk_size": CHUNK,
        "budget": {"type": "saturating", "limit": 12},
    },
    "kvm_three_chunks": {
        "type": "kvm",
        "chunk_size": CHUNK,
        "window_chunks": 3,
        "sink": 2,
        "budget": {"type": "power_law", "factor": 2},
    },
    "kvm_one_chunk_no_gate": {
        "type": "kvm",
        "chunk_size": CHUNK,
        "window_chunks": 1,
        "sink": 0,
        "merge_gate": "none",
        "temperatures": "none",
        "budget": {"type": "power_law", "factor": 2},
    },
    "kvm_counts": {
        "type": "kvm",
        "chunk_size": CHUNK,
        "value_scale": "count",
        "gated_writes": ["initial", "append", "merge"],
        "gated_parts": ["value"],
        "budget": {"type": "power_law", "factor": 2},
    },
    "kvm_chunk_counts": {
        "type": "kvm",
        "chunk_size": CHUNK,
        "value_scale": "chunk_count",
        "budget": {"type": "fixed", "count": CHUNK},
    },
}
SOURCES = {
    "projection": {"type": "projection"},
    "projection_plain": {"type": "projection", "residual": "none"},
    "bank": {"type": "bank"},
    "bank_fixed": {"type": "bank", "scale": "fixed"},
}
HEADS = {"heads": (4, 4), "grouped": (4, 2), "one_kv_head": (4, 1)}
PAIRS = [
    *itertools.product(MEMORIES, SOURCES, ["grouped"]),
    *itertools.product(
        ["full", "block_window_sink", "kvm_power_law"], ["projection", "bank"], HEADS
    ),
]


def make_model(memory: str, source: str, heads: str, dtype: torch.dtype, **settings):
    torch.manual_seed(0)
    query_heads, kv_heads = HEADS[heads]
    config = MeanbankConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        **{
            "value_head_dim": 6,
            "residual_scale": 1.0,
            "plan": [
                {"memory": MEMORIES[memory]},
                {"where": "last_two_thirds", "values": SOURCES[source]},
            ],
            **settings,
        },
    )
    model = MeanbankForCausalLM(config)
    with torch.no_grad():  # start values hide what multiplies by zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def read(model, ids, splits):
    """Logits and the states after reading ids in pieces of the given lengths."""
    cache, logits, position = None, [], 0
    with torch.inference_mode():
        for length in splits:
            output = model(ids[:, position : position + length], cache=cache, use_cache=True)
            cache, position = output.cache, position + length
            logits.append(output.logits)
    assert position == ids.shape[1]
    return torch.cat(logits, dim=1), [layer.state for layer in cache.layers]


def assert_close(tensor, reference, tolerance):
    """Within `tolerance` of the largest entry, or absolutely where all are below 1."""
    scale = max(1.0, reference.abs().max().item())
    assert (tensor.double() - reference.double()).abs().max() <= tolerance * scale


def assert_same(found, expected, tolerance):
    logits, states = found
    wanted, wanted_states = expected
    assert (logits - wanted).abs().max() <= tolerance
    for state, reference in zip(states, wanted_states, strict=True):
        assert isinstance(state, State)
        ours, theirs = list(state.tensors()), list(reference.tensors())
        assert [t.shape for t in ours] == [t.shape for t in theirs]
        for tensor, other in zip(ours, theirs, strict=True):
            assert_close(tensor, other, tolerance)


@pytest.mark.parametrize(("memory", "source", "heads"), sorted(set(PAIRS)))
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
@pytest.mark.parametrize("source", SOURCES)
def test_single_precision(memory, source):
    model = make_model(memory, source, "grouped", torch.float32)
    ids = torch.randint(40, (2, 33))
    assert_same(read(model, ids, [1] * 33), read(model, ids, [33]), 1e-5)


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_future_does_not_leak(memory):
    model = make_model(memory, "bank", "grouped", torch.float64)
    ids = torch.randint(40, (1, 30))
    before = model(ids, use_cache=False).logits
    for position in (5, 12, 29):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 40
        after = model(changed, use_cache=False).logits
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", ["projection", "bank"])
def test_rows_of_a_batch_keep_apart(memory, source):
    model = make_model(memory, source, "grouped", torch.float64)
    ids = torch.randint(40, (3, 29))
    together = model(ids, use_cache=False).logits
    for row in range(3):
        alone = model(ids[row : row + 1], use_cache=False).logits
        assert (alone[0] - together[row]).abs().max() <= 1e-12


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", ["projection", "bank"])
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


@pytest.mark.parametrize("memory", ["full", "block_window_sink", "kvm_power_law"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("others", SOURCES)
def test_any_source_in_the_first_layer(memory, source, others):
    plan = [
        {"memory": MEMORIES[memory], "values": SOURCES[others]},
        {"where": [0], "values": SOURCES[source]},
    ]
    model = make_model(memory, source, "grouped", torch.float64, plan=plan)
    ids = torch.randint(40, (1, 21))
    assert_same(read(model, ids, [1] * 21), read(model, ids, [21]), 1e-10)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", SOURCES)
def test_saved_and_loaded_models_are_the_same(memory, source, tmp_path):
    model = make_model(memory, source, "grouped", torch.float32)
    model.save_pretrained(tmp_path)
    again = MeanbankForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(40, (1, 30))
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_parameter_learns(memory, source):
    model = make_model(memory, source, "grouped", torch.float32).train()
    ids = torch.randint(40, (2, 41))
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        first_residual = "layers.0.attention.values.residual" in name  # a no-op by definition
        if not first_residual:
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "full"])
@pytest.mark.parametrize("source", ["projection", "bank"])
def test_states_do_not_pin_the_prompt(memory, source):
    model = make_model(memory, source, "grouped", torch.float32)
    with torch.inference_mode():
        cache = model(torch.randint(40, (1, 200)), use_cache=True).cache
    for layer in cache.layers:
        for tensor in layer.state.tensors():
            held = tensor.untyped_storage().nbytes()
            assert held <= 2 * tensor.numel() * tensor.element_size(), tensor.shape
