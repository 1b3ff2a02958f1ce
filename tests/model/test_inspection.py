"""What a cache says of itself."""

import pytest
import torch

from tests.conformance.models import MEMORIES, make_model

PLAN = [
    {"memory": MEMORIES["kvm_power_law"]},
    {"where": [1], "memory": MEMORIES["ovq"], "values": "bank"},
    {"where": [2], "memory": "rwkv7"},
    {"where": [3], "memory": MEMORIES["sliding_window_sink"], "values": "bank"},
    {"where": [4], "memory": "full"},
]


@torch.inference_mode()
def read(model, ids, cache, **arguments):
    return model(ids, cache=cache, **arguments).cache


def test_every_kind_of_layer():
    model = make_model("full", "bank", "heads", torch.float32, layers=5, plan=PLAN)
    cache = read(model, torch.randint(40, (2, 30)), model.model.new_cache())
    found = cache.describe()
    kvm, ovq, rwkv7, window, full = found.layers
    # chunk 4, window 8: at 28 tokens 24 had left the window, and 2 sqrt(28) rows were allowed
    assert (kvm.memory, kvm.values, kvm.exact, kvm.rows) == ("kvm", "projection", (6, 6), (10, 10))
    assert (kvm.budget, kvm.appended, kvm.merged) == ((10, 10), (6, 6), (14, 14))
    # chunk 4: 28 tokens taken in, 12 * 28 / (12 + 28) = 8.4 rows allowed, the first by itself
    assert (ovq.memory, ovq.values, ovq.exact, ovq.rows) == ("ovq", "bank", (2, 2), (8, 8))
    assert (ovq.budget, ovq.appended, ovq.merged) == ((8, 8), (7, 7), (20, 20))
    assert (rwkv7.exact, rwkv7.rows, rwkv7.budget) == ((0, 0), (0, 0), (None, None))
    assert set(rwkv7.nbytes) == {"matrix", "last tokens"}
    assert (window.exact, window.rows, window.merged) == ((7, 7), (0, 0), (0, 0))
    assert full.exact == (30, 30)
    assert found.nbytes == cache.nbytes()
    assert found.lengths == (30, 30)
    # float32: keys of 8 and values of 6 channels in 4 heads; a gate; rows in fp32 with a radius
    assert kvm.nbytes["exact tokens"] == 2 * 6 * 4 * 4 * (8 + 6 + 1)
    assert kvm.nbytes["rows"] == 2 * 10 * 4 * 4 * (8 + 6 + 1)
    assert window.nbytes["exact tokens"] == 2 * 7 * (4 * 4 * 8 + 4)  # a bank keeps ids
    lines = str(found).splitlines()
    assert lines[0] == f"30 tokens of 2 sequences, {cache.nbytes():,} bytes"
    assert [line.split()[0] for line in lines[1:]] == ["layer", *(f"layers.{i}" for i in range(5))]
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("backbone", ["gptalpha2", "nanochat"])
def test_bytes_add_up_with_and_without_a_record(memory, backbone):
    model = make_model(memory, "bank", "grouped", torch.float32, layers=2, backbone=backbone)
    ids = torch.randint(40, (2, 29))
    plain = read(model, ids, model.model.new_cache()).describe()
    cache = model.model.new_cache()
    cache.activate_past_recording(6)
    cache.activate_provenance()
    recorded = read(model, ids, cache).describe()
    assert recorded.nbytes == sum(layer.nbytes() for layer in cache.layers)
    for layer, other in zip(recorded.layers, plain.layers, strict=True):
        assert "record" not in other.nbytes
        kept = {name: size for name, size in layer.nbytes.items() if name != "record"}
        assert kept == other.nbytes
        assert (layer.exact, layer.rows) == (other.exact, other.rows) or layer.memory != "kvm"
    assert ("stem" in [layer.name for layer in plain.layers]) == (backbone == "nanochat")


def test_rows_at_different_places_are_told_apart():
    model = make_model("kvm_power_law", "bank", "grouped", torch.float32, layers=2)
    ids, lengths = torch.randint(40, (3, 26)), (26, 3, 0)
    mask = torch.arange(26) >= 26 - torch.tensor(lengths)[:, None]
    cache = read(model, ids, model.model.new_cache(), attention_mask=mask.long())
    found = cache.describe()
    assert found.lengths == lengths
    assert found.layers[0].exact == (6, 3, 0)
    assert found.layers[0].rows[1:] == (0, 0)
    assert found.layers[0].merged[1:] == (0, 0)
    assert "0 to 26 tokens of 3 sequences" in str(found)
    with pytest.raises(ValueError, match="is empty"):
        model.model.new_cache().describe()
