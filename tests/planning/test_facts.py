"""Parameters, FLOPs, steps and rows against the numbers of the authors' code."""

import json
from pathlib import Path

import pytest

from meanbank import MeanbankConfig
from meanbank.core.geometry import Geometry
from meanbank.data import DataConfig
from meanbank.memory import KVM, Fixed, PowerLaw, Saturating
from meanbank.model.accounting import (
    PARAMETER_PARTS,
    empty_model,
    papers_flops_by_part,
    parameters_by_part,
)
from meanbank.training import RunConfig
from meanbank.training.planning import plan_run

FACTS = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
BOV, KVM_FACTS = FACTS["bov"], FACTS["kvm"]

FIXED = {"scale": "fixed"}
BOV_SOURCES = {
    "gpt_base": {"type": "projection"},
    "gpt_base_v_scale_learn": {"type": "projection", "scale": "learned"},
    "gpt_base_v_from_value_emb_learn": {"type": "bank"},
    "gpt_base_v_from_value_emb": {"type": "bank", **FIXED},
    "gpt_base_v_from_value_emb_learn_shared": {"type": "bank", "table": "shared"},
    "gpt_base_v_from_v1_learn": {"type": "first_layer"},
    "gpt_base_v_from_x0_learn": {"type": "initial_embedding"},
    "gpt_base_v_from_x0": {"type": "initial_embedding", **FIXED},
    "gpt_base_add_init_value_emb_learn": {"type": "mixed", "other": {"type": "bank", **FIXED}},
    "gpt_base_add_init_value_emb_nanogpt": {"type": "gated_additive"},
    "gpt_base_add_init_v_learn": {"type": "mixed", "other": {"type": "first_layer", **FIXED}},
    "gpt_base_add_init_res_v_learn": {
        "type": "mixed",
        "other": {"type": "initial_embedding", **FIXED},
    },
}
DEAD_PROJECTION = {"bank", "first_layer"}  # sources that leave the authors' W_V without use

SLIDING = {"memory": {"type": "sliding_window", "window": 256}, "address": {"rotary_fraction": 1}}
SATURATING = {"type": "saturating", "limit": 1024}
KVM_PLANS = {
    "kvm_wd": [{"memory": {"type": "kvm", "budget": {"type": "fixed", "count": 256}}}],
    "kvm_sqrt16_wd": [{"memory": {"type": "kvm"}}],
    "kvm_swa_saturate1024_wd": [
        SLIDING,
        {"where": "odd", "memory": {"type": "kvm", "budget": SATURATING}, "address": {}},
    ],
    "ovq_swa_ts_c256_s1024_wd": [
        SLIDING,
        {"where": "odd", "memory": {"type": "ovq", "budget": SATURATING}, "address": {}},
    ],
    "gptalpha_wd": [{"memory": {"type": "full"}}],
    "gptalpha_bswa_wd": [{"memory": {"type": "block_window"}}],
}
BUDGETS = {
    "kvm_wd": Fixed(count=256),
    "kvm_sqrt16_wd": PowerLaw(),
    "kvm_swa_saturate1024_wd": Saturating(limit=1024),
}


@pytest.mark.parametrize("name", BOV["models"])
def test_bov_models(name):
    size, _, arm = name.partition(".")
    facts, sizes, source = BOV["models"][name], BOV["sizes"][size], BOV_SOURCES[arm]
    layers, width = sizes["num_hidden_layers"], sizes["hidden_size"]
    config = RunConfig(
        model={
            "backbone": "nanochat",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": sizes["num_attention_heads"],
            "plan": [  # windows SSSL of 512 and 2048 tokens before the query's own
                {"memory": {"type": "sliding_window", "window": 513}},
                {
                    "where": list(range(3, layers, 4)),
                    "memory": {"type": "sliding_window", "window": 2049},
                },
                {"where": "last_third", "values": source},
            ],
        },
        data=DataConfig(
            vocab_size=32768,
            sequence_length=2048,
            batch_size=sizes["tokens_per_step"] // 2048,
        ),
    )
    plan = plan_run(config, flops=sizes["target_flops"], convention="papers")
    assert plan.flops_per_token == facts["flops_per_token"]
    assert (plan.steps, plan.tokens) == (facts["steps"], facts["tokens"])
    dead = layers // 3 * width**2 if source["type"] in DEAD_PROJECTION else 0
    assert plan.num_parameters + dead == facts["parameters"]
    assert sum(plan.parameters.values()) == plan.num_parameters


@pytest.mark.parametrize("name", KVM_FACTS["parameters"])
def test_kvm_models(name):
    size, _, arm = name.partition(".")
    sizes = {"120M": (768, 12, 6), "350M": (1024, 24, 8)}[size]
    width, layers, heads = sizes
    config = MeanbankConfig(
        vocab_size=50304,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        plan=KVM_PLANS[arm],
    )
    model = empty_model(config)
    parts = parameters_by_part(model)
    assert sum(parts.values()) == KVM_FACTS["parameters"][name]
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(parts.values())
    assert "rest" not in parts
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", KVM_FACTS["rows"])
def test_rows_are_the_authors(name):
    sizes = Geometry(
        hidden_size=8, num_heads=1, num_kv_heads=1, key_dim=8, value_dim=8, rotary_dim=4
    )
    schedule = list(KVM(budget=BUDGETS[name]).build(sizes).schedule(65537))
    assert schedule[0] == (512, 256)
    assert [seen for seen, _ in schedule[1:]] == list(range(768, 65537, 256))
    assert [rows for _, rows in schedule[1:]] == KVM_FACTS["rows"][name]


def test_every_parameter_has_a_part():
    mixed = {"type": "mixed", "other": {"type": "first_layer", **FIXED}}
    for backbone, plan in (
        ("gptalpha2", [{"memory": "kvm"}, {"where": "last_third", "values": mixed}]),
        ("nanochat", [{"memory": "rwkv7", "values": "gated_additive"}]),
        ("gptalpha2", [{"memory": "rwkv7"}, {"where": "last_third", "values": "bank"}]),
    ):
        config = MeanbankConfig(
            backbone=backbone,
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            plan=plan,
        )
        model = empty_model(config)
        parts = parameters_by_part(model)
        assert sum(parts.values()) == sum(parameter.numel() for parameter in model.parameters())
        assert set(parts) <= set(PARAMETER_PARTS)
        assert parts.get("rest", 0) == (
            25 if backbone == "nanochat" else 0
        )  # gate and mix of smear
        assert papers_flops_by_part(model, 4)["stem"].total == 0
