"""Recipes against their authors' parameter groups, and their schedules."""

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.training import KVMRecipe, PlainRecipe, TrainingConfig
from meanbank.training.recipes import BoVRecipe

FACTS_KVM, FACTS_BOV = (
    json.loads((Path(__file__).parent / f"facts_{paper}.json").read_text(encoding="utf-8"))
    for paper in ("kvm", "bov")
)
SLIDING = {"memory": {"type": "sliding_window", "window": 256}}
SATURATING = {"type": "saturating", "limit": 1024}
KVM_PLANS = {
    "kvm": [{"memory": {"type": "kvm", "budget": {"type": "fixed", "count": 256}}}],
    "kvm_sqrt16": [{"memory": "kvm"}],
    "kvm_swa_saturate1024": [
        {"memory": {"type": "kvm", "budget": SATURATING}},
        {"where": "even", **SLIDING},
    ],
    "gptalpha": [{"memory": "full"}],
    "gptalpha_bswa": [{"memory": "block_window"}],
    "ovq_swa_ts_c256_s1024": [
        {"memory": {"type": "ovq", "budget": SATURATING}},
        {"where": "even", **SLIDING},
    ],
}
KVM_SIZES = {
    "120M": {},
    "350M": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8},
}
BOV_SIZES = {
    "d12": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 6},
    "d24": {"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 12},
}
D24 = BoVRecipe(
    matrix_learning_rate=0.02 * 2**0.5,
    matrix_weight_decay=0.05973833,
    scale_learning_rate=0.5 * 2**0.5,
)
SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BANK = [{}, {"where": [1], "values": "bank"}]


def on_meta(**settings) -> MeanbankForCausalLM:
    with torch.device("meta"):
        return MeanbankForCausalLM(MeanbankConfig(**settings))


def named(model, group) -> list[str]:
    """Names of a group's parameters, without layer numbers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [re.sub(r"\.\d+\.", ".*.", names[parameter]) for parameter in group["params"]]


@pytest.mark.parametrize("case", FACTS_KVM["models"])
def test_the_kvm_groups_are_the_authors(case):
    size, plan = case.split(".")
    facts = FACTS_KVM["models"][case]
    model = on_meta(plan=KVM_PLANS[plan], **KVM_SIZES[size])
    groups = KVMRecipe().optimizer(model, facts["steps"]).param_groups
    assert KVMRecipe().default_warmup_steps(facts["steps"]) == facts["warmup_steps"]
    assert all(group["betas"] == tuple(FACTS_KVM["betas"]) for group in groups)
    assert all(group["eps"] == FACTS_KVM["eps"] for group in groups)
    left = [
        {**group, "kind": group["name"].replace("low-rank factors", "matrices")} for group in groups
    ]
    for expected in facts["groups"]:  # theirs has low-rank factors among matrices of equal ratio
        found = [
            group
            for group in left
            if group["kind"] == expected["group"]
            and group["lr"] == pytest.approx(expected["lr"], rel=1e-5)
        ]
        left = [group for group in left if not any(group is each for each in found)]
        for group in found:
            assert group["weight_decay"] == pytest.approx(expected["weight_decay"], rel=1e-5)
        parameters = [parameter for group in found for parameter in group["params"]]
        assert len(parameters) == expected["n_tensors"]
        assert sum(parameter.numel() for parameter in parameters) == expected["n_elements"]
        names = {name for group in found for name in named(model, group)}
        assert names == set(FACTS_KVM["names"][expected["names"]])
    assert not left


def test_low_rank_factors_of_rwkv7_scale_by_their_own_rank():
    model = on_meta(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, plan=[{"memory": "rwkv7"}]
    )
    groups = KVMRecipe().optimizer(model, 6000).param_groups
    rates = {name: group["lr"] for group in groups for name in named(model, group)}
    inside = "model.layers.*.attention."
    assert rates[inside + "decay.up.weight"] == rates[inside + "rate.up.weight"] == 2e-3
    assert rates[inside + "gate.up.weight"] == pytest.approx(2e-3 * 128 / 160)
    assert rates[inside + "gate.down.weight"] == pytest.approx(2e-3 * 768 / 1024)
    assert rates[inside + "bonus"] == 2e-3
    vectors = next(group for group in groups if group["name"] == "vectors")
    assert inside + "bonus" in named(model, vectors)


@pytest.mark.parametrize("case", FACTS_BOV["models"])
def test_the_bov_groups_are_the_authors(case):
    size, source = case.split(".")
    facts = FACTS_BOV["models"][case]
    plan = [{"memory": "full"}, {"where": "last_third", "values": source}]
    model = on_meta(backbone="nanochat", vocab_size=32768, plan=plan, **BOV_SIZES[size])
    recipe = BoVRecipe() if size == "d12" else D24
    optimizer = recipe.optimizer(model, facts["steps"])
    muon, adamw = optimizer.parts
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    found = {
        name.replace(".contextual", ""): (part, group)
        for part in optimizer.parts
        for group in part.param_groups
        for name in named(model, group)
    }
    counts = Counter(
        name.replace(".contextual", "")
        for group in optimizer.param_groups
        for name in named(model, group)
    )
    assert counts == Counter(
        {name: n for group in facts["groups"] for name, n in group["n_tensors"].items()}
    )
    assert len(optimizer.param_groups) == len(facts["groups"])
    for expected in facts["groups"]:
        for name in expected["n_tensors"]:
            part, group = found[name]
            assert part is (muon if expected["optimizer"] == "muon" else adamw), name
            for setting in ("lr", "weight_decay", "betas", "eps", "ns_steps"):
                if setting in expected:
                    value = group[setting]
                    assert value == pytest.approx(expected[setting], rel=2e-6), (name, setting)


def test_muon_takes_the_matrices_of_the_other_backbone_too():
    plan = [{"memory": "kvm"}, {"where": "odd", "memory": "rwkv7"}]
    model = on_meta(plan=plan, **SMALL)
    muon, adamw = BoVRecipe().optimizer(model, 100).parts
    assert all(p.ndim == 2 for group in muon.param_groups for p in group["params"])
    names = {name for group in muon.param_groups for name in named(model, group)}
    inside = "model.layers.*.attention."
    assert {inside + "memory.gate.weight", inside + "values.residual.up.weight"} <= names
    assert {inside + "decay.up.weight", inside + "receptance.weight"} <= names
    (group,) = (group for group in adamw.param_groups if group["name"] == "vectors")
    assert (group["lr"], group["betas"], group["weight_decay"]) == (2e-3, (0.9, 0.95), 0)
    assert inside + "bonus" in named(model, group)
    (group,) = muon.param_groups
    assert group["adjust_lr_fn"] == "original"
    assert group["nesterov"]


@pytest.mark.parametrize("recipe", [KVMRecipe(), PlainRecipe(), BoVRecipe()])
def test_what_value_sources_add_is_in_groups_of_its_own(recipe):
    plan = [
        {"where": [1], "values": "bank"},
        {"where": [2], "values": {"type": "first_layer", "scale": "per_head"}},
        {"where": [3], "values": {"type": "mixed", "other": {"type": "bank", "scale": "fixed"}}},
    ]
    model = on_meta(plan=plan, **{**SMALL, "num_hidden_layers": 4})
    groups = {group["name"]: group for group in recipe.optimizer(model, 100).param_groups}
    gamma = 0.5 if recipe.tag == "bov" else 0.1
    expected = {  # learning rate, betas, decay, parameters
        "tables": (0.15, (0.8, 0.995), 0.01, ["table", "other.table"]),
        "scales": (gamma, (0.96, 0.95), 0.0, ["scale", "other_weight"]),
        "head scales": (0.005, (0.8, 0.95), 0.0, ["scale"]),
        "contextual weights": (0.005, (0.8, 0.95), 0.05, ["contextual_weight"]),
    }
    for name, (rate, betas, decay, members) in expected.items():
        group = groups[name]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (rate, betas, decay)
        assert group["eps"] == 1e-10
        assert named(model, group) == [f"model.layers.*.attention.values.{n}" for n in members]
    (head_scale,) = groups["head scales"]["params"]
    assert head_scale.ndim == 1


@pytest.mark.parametrize("recipe", [KVMRecipe(), PlainRecipe()])
def test_learning_rates_rise_and_fall_linearly(recipe):
    optimizer = recipe.optimizer(on_meta(plan=BANK, **SMALL), 10)

    def factors(steps, warmup_steps):
        for step in range(steps):
            recipe.set_step(optimizer, step, steps, warmup_steps)
            (factor,) = {
                round(group["lr"] / group["peak_lr"], 9) for group in optimizer.param_groups
            }
            yield factor

    rising = [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert list(factors(10, 4)) == pytest.approx(rising)
    assert list(factors(1, 0)) == [1]
    assert list(factors(4, 4)) == [0.25, 0.5, 0.75, 1]
    assert list(factors(30, None)) == list(factors(30, 3))


def test_decay_follows_the_learning_rate_in_the_kvm_recipe_only():
    model = on_meta(plan=BANK, **SMALL)
    for recipe, factor in ((KVMRecipe(), 0.25), (PlainRecipe(), 1.0)):
        optimizer = recipe.optimizer(model, 100)
        recipe.set_step(optimizer, 75, 100, 0)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(0.25 * group["peak_lr"])
            follows = 1.0 if group["name"] in ("tables", "scales") else factor
            assert group["weight_decay"] == pytest.approx(follows * group["peak_weight_decay"])


def theirs(step: int, steps: int) -> tuple[float, float, float]:
    """Factor, momentum and decay factor as nanochat's training script writes them."""
    warmdown = round(0.65 * steps)
    start = steps - warmdown
    left = (steps - step) / warmdown
    factor = 1.0 if step <= start else left + (1 - left) * 0.05
    if step < 40:
        factor = (step + 1) / 40
    momentum = 0.97
    if step < 400:
        momentum = (1 - step / 400) * 0.85 + step / 400 * 0.97
    elif step >= start:
        momentum = 0.97 * left + 0.90 * (1 - left)
    return factor, momentum, 0.5 * (1 + math.cos(math.pi * step / steps))


@pytest.mark.parametrize("steps", [3766, 3838, 7809, 7998])
def test_the_bov_schedules_are_the_authors(steps):
    recipe = BoVRecipe()
    optimizer = recipe.optimizer(on_meta(plan=BANK, **SMALL), steps)
    for step in [*range(0, steps, 37), 39, 40, 399, 400, steps - 1]:
        recipe.set_step(optimizer, step, steps)
        factor, momentum, decay = theirs(step, steps)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(factor * group["peak_lr"])
            if group["name"] == "matrices":
                assert group["momentum"] == pytest.approx(momentum)
                assert group["weight_decay"] == pytest.approx(0.28 * decay)
            else:
                assert group["weight_decay"] == group["peak_weight_decay"]


def test_short_bov_runs_have_schedules_without_jumps():
    recipe = BoVRecipe()
    optimizer = recipe.optimizer(on_meta(plan=BANK, **SMALL), 100)
    matrices = optimizer.param_groups[0]
    seen = []
    for steps in (1, 2, 3, 100):
        for step in range(steps):
            recipe.set_step(optimizer, step, steps)
            seen.append((matrices["lr"] / 0.02, matrices["momentum"]))
    rates, momenta = zip(*seen[6:], strict=True)
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) <= 0.1 + 1e-9
    assert max(abs(a - b) for a, b in itertools.pairwise(momenta)) < 2e-3
    assert rates[-1] == pytest.approx(0.05 + 0.95 / 65)
    assert min(rate for rate, _ in seen) > 0


def test_the_warm_up_is_the_recipes_unless_it_is_set():
    for recipe, long, short in ((KVMRecipe(), 200, 10), (BoVRecipe(), 40, 10)):
        assert TrainingConfig(recipe=recipe, steps=6000).warmup_steps == long
        assert TrainingConfig(recipe=recipe, steps=100).warmup_steps == short
        assert TrainingConfig(recipe=recipe, steps=100, warmup_steps=0).warmup_steps == 0


def test_a_clip_of_zero_would_leave_no_gradient():
    with pytest.raises(ValueError, match="clip must be positive, or null"):
        PlainRecipe(clip=0.0)
