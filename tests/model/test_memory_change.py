"""Models with other memories than in training, against their weights loaded into such a model."""

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.core.config import build
from meanbank.memory import KVM, Full, MemoryConfig
from meanbank.model.memory_change import with_memories
from tests.conformance.models import MEMORIES, SOURCES, make_model

FIXED = {**MEMORIES["kvm_power_law"], "budget": {"type": "fixed", "count": 5}}
PLAIN = {**MEMORIES["kvm_power_law"], "temperatures": "none", "merge_gate": "none"}
IDS = torch.randint(40, (2, 37), generator=torch.Generator().manual_seed(1))


def memory(settings) -> MemoryConfig:
    return build(MemoryConfig, settings)


def trained(name, source="projection_gated", **settings) -> MeanbankForCausalLM:
    return make_model(name, source, "grouped", torch.float64, layers=2, **settings)


def loaded(model, name_or_memory, source="projection_gated", **settings) -> MeanbankForCausalLM:
    """The weights of a model in one that was made with that memory."""
    plan = [{"memory": name_or_memory}, {"where": [1], "values": SOURCES[source]}]
    made = trained("full", source, plan=plan, **settings)
    lacks = made.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for name in lacks.missing_keys:
            assert name.endswith(("norm.weight", "norm.bias", "temperature"))
            made.get_parameter(name).fill_(0.0 if name.endswith("bias") else 1.0)
    return made


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("source", ["projection_gated", "bank_shared", "first_layer"])
def test_another_budget_is_that_of_a_model_made_with_it(source):
    model = trained("kvm_power_law", source)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    plain = logits(model)
    change = with_memories(model, {0: memory(FIXED), 1: memory(FIXED)})
    assert (change.layers, change.new, change.dropped) == ((0, 1), (), ())
    assert torch.equal(logits(change.model), logits(loaded(model, FIXED, source)))
    assert not torch.equal(logits(change.model), plain)
    assert torch.equal(logits(model), plain)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert [plan.memory.budget.tag for plan in model.config.plans()] == ["power_law"] * 2


def test_kvm_after_full_attention():
    """LN_s is new and starts as nothing but a norm; rotary channels stay as they were."""
    model, random = trained("full"), torch.get_rng_state()
    change = with_memories(model, {0: memory(PLAIN), 1: memory(PLAIN)})
    assert torch.equal(torch.get_rng_state(), random)
    norms = [
        f"model.layers.{layer}.attention.memory.norm.{part}"
        for layer in range(2)
        for part in ("weight", "bias")
    ]
    assert (list(change.new), change.dropped) == (norms, ())
    for name in norms:
        assert (change.model.get_parameter(name) == float(name.endswith("weight"))).all()
    assert torch.equal(logits(change.model), logits(loaded(model, PLAIN)))
    assert (logits(change.model)[:, :8] - logits(model)[:, :8]).abs().max() < 1e-12
    assert (logits(change.model)[:, 16:] - logits(model)[:, 16:]).abs().max() > 1e-3


def test_addresses_stay_as_they_were_trained():
    """A convention of the new memory (a quarter of the channels is fewer than half) is not used."""
    address = {"rotary_fraction": 0.25}
    plan = [{"memory": "full", "address": address}]
    model = trained("full", plan=plan)
    changed = with_memories(model, {0: memory(PLAIN), 1: memory(PLAIN)}).model
    assert [p.address for p in changed.config.plans()] == [p.address for p in model.config.plans()]
    memories = [block.attention.memory for block in changed.model.layers]
    assert [found.geometry.rotary_dim for found in memories] == [2, 2]
    ovq = with_memories(model, {0: memory(MEMORIES["ovq"]), 1: memory(MEMORIES["ovq"])}).model
    assert [p.address.rotary_fraction for p in ovq.config.plans()] == [0.25, 0.25]


def test_parameters_without_use_are_dropped():
    model = trained("kvm_power_law")
    change = with_memories(model, {0: Full(), 1: Full()})
    parts = ("norm.weight", "norm.bias", "gate.weight", "state_temperature", "window_temperature")
    assert set(change.dropped) == {
        f"model.layers.{layer}.attention.memory.{part}" for layer in range(2) for part in parts
    }
    assert torch.equal(logits(change.model), logits(loaded(model, "full")))


def test_the_same_memories_change_nothing():
    model = trained("kvm_power_law")
    change = with_memories(model, {n: p.memory for n, p in enumerate(model.config.plans())})
    assert torch.equal(logits(change.model), logits(model))
    assert with_memories(model, {}).layers == ()


@pytest.mark.parametrize("storage", ["mmap", "int8"])
def test_tables_stay_where_they_are(storage, tmp_path):
    model = trained("full", "bank").float()
    model.save_pretrained(tmp_path)
    stored = MeanbankForCausalLM.from_pretrained(tmp_path, bank_storage=storage).eval()
    changed = with_memories(stored, {0: memory(PLAIN), 1: memory(PLAIN)}).model
    tables = [m.model.layers[1].attention.values.table for m in (stored, changed)]
    assert tables[0] is tables[1]
    assert changed.model.stored_tables == stored.model.stored_tables
    expected = logits(with_memories(model, {0: memory(PLAIN), 1: memory(PLAIN)}).model)
    tolerance = 0.0 if storage == "mmap" else 0.05
    assert (logits(changed) - expected).abs().max() <= tolerance


def test_what_does_not_fit_is_told():
    full, nanochat = trained("full"), trained("full", backbone="nanochat")
    with pytest.raises(ValueError, match=r"layers.0.*gate.weight would start with random .*: none"):
        with_memories(full, {0: KVM(), 1: KVM()})
    told = r"layer 0 keeps the rotary_fraction 1 that it was trained with: .*stored_rotary: kept"
    with pytest.raises(ValueError, match=told):
        with_memories(nanochat, {0: memory(PLAIN), 1: memory(PLAIN)})
    kept = memory({**PLAIN, "stored_rotary": "kept"})
    assert with_memories(nanochat, {0: kept, 1: kept}).layers == (0, 1)
    told = "layer 1 would take up the values of layer 1, not of 0 as in training"
    with pytest.raises(ValueError, match=told):
        with_memories(full, {1: memory(PLAIN)})
    alone = trained("full", "projection_plain")
    assert with_memories(alone, {1: memory(PLAIN)}).layers == (1,)
    with pytest.raises(ValueError, match="layer 0 cannot become kvm: a layer with rwkv7 has other"):
        with_memories(trained("rwkv7"), {0: memory(PLAIN)})
    with pytest.raises(ValueError, match="layer 0 cannot become rwkv7"):
        with_memories(full, {0: memory("rwkv7")})


def test_a_changed_model_keeps_its_dtype():
    config = MeanbankConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        plan=[{"memory": "full"}],
    )  # fmt: skip
    model = MeanbankForCausalLM(config).to(torch.bfloat16).eval()
    changed = with_memories(model, {0: memory(PLAIN)}).model
    assert {p.dtype for p in changed.parameters()} == {torch.bfloat16}
    assert logits(changed).isfinite().all()
