"""Recipes against the KVM authors' groups, and the schedule."""

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.training.recipes import KVMRecipe, PlainRecipe, schedule


def groups(config: MeanbankConfig, steps: int) -> dict[str, dict]:
    with torch.device("meta"):
        model = MeanbankForCausalLM(config)
    found = {g["name"]: g for g in KVMRecipe().groups(model, steps)}
    assert sum(len(g["params"]) for g in found.values()) == len(list(model.parameters()))
    return found


def test_the_groups_of_the_120m_model():
    found = groups(MeanbankConfig(), 6000)
    for name in ("embedding", "matrices", "low-rank factors", "head"):
        assert found[name]["lr"] == pytest.approx(2e-3)
        assert found[name]["weight_decay"] == pytest.approx(0.2)
    assert found["vectors"]["lr"] == pytest.approx(2e-3)
    assert found["vectors"]["weight_decay"] == 0
    assert len(found["vectors"]["params"]) == 208
    assert sum(p.numel() for p in found["vectors"]["params"]) == 95_376
    matrices = found["matrices"]["params"] + found["low-rank factors"]["params"]
    assert len(matrices) == 108
    assert sum(p.numel() for p in matrices) == 85_579_776


def test_the_groups_of_the_350m_model():
    config = MeanbankConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=8)
    found = groups(config, 15000)
    assert found["embedding"]["lr"] == pytest.approx(0.00126491, rel=1e-5)
    assert found["embedding"]["weight_decay"] == pytest.approx(0.126491, rel=1e-5)
    assert found["matrices"]["lr"] == pytest.approx(0.0009486825, rel=1e-5)
    assert found["matrices"]["weight_decay"] == pytest.approx(0.16865466666, rel=1e-5)
    assert len(found["matrices"]["params"]) == 192
    assert found["low-rank factors"]["lr"] == pytest.approx(0.00126491, rel=1e-5)
    assert len(found["low-rank factors"]["params"]) == 24
    assert found["head"]["lr"] == pytest.approx(0.0009486825, rel=1e-5)


def test_banks_are_a_group_of_their_own_in_every_recipe():
    config = MeanbankConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        plan=[{}, {"where": [1], "values": {"type": "bank"}}],
    )
    model = MeanbankForCausalLM(config)
    bank = model.model.layers[1].attention.values
    for recipe in (KVMRecipe(), PlainRecipe()):
        optimizer = recipe.optimizer(model, 100)
        members = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert len(members) == len(set(members)) == len(list(model.parameters()))
        by_name = {group["name"]: group for group in optimizer.param_groups}
        assert by_name["bank tables"]["params"] == [bank.table]
        assert by_name["bank tables"]["lr"] == 0.15
        assert by_name["bank tables"]["betas"] == (0.8, 0.995)
        assert by_name["bank scales"]["params"] == [bank.scale]
        assert by_name["bank scales"]["weight_decay"] == 0


def test_decay_follows_the_learning_rate_in_the_kvm_recipe_only():
    config = MeanbankConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        plan=[{}, {"where": [1], "values": "bank"}],
    )
    model = MeanbankForCausalLM(config)
    for recipe, factor in ((KVMRecipe(), 0.25), (PlainRecipe(), 1.0)):
        optimizer = recipe.optimizer(model, 100)
        recipe.set_progress(optimizer, 0.25)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(0.25 * group["peak_lr"])
            follows = 1.0 if group["name"].startswith("bank") else factor
            assert group["weight_decay"] == pytest.approx(follows * group["peak_weight_decay"])


def test_the_schedule_rises_and_falls_linearly():
    factors = [schedule(step, 10, 4) for step in range(10)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert schedule(0, 1, 0) == 1
    assert schedule(3, 4, 4) == 1
