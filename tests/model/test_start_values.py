"""Start values and plans: the paper's, and what a bank starts from."""

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM, expand_plan, layers_at


def small(**settings) -> MeanbankForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    return MeanbankForCausalLM(MeanbankConfig(**{**sizes, **settings}))


def test_the_papers_start_values():
    model = small()
    first, second = model.model.layers
    assert model.model.embedding.weight.abs().max() <= 1e-4
    assert model.model.embedding.weight.std().item() == pytest.approx(1e-4 / 3**0.5, rel=0.02)
    gram = model.lm_head.weight.T @ model.lm_head.weight  # orthogonal, gain 0.5 sqrt(V / d)
    assert torch.allclose(gram, torch.eye(96) * 0.25 * 300 / 96, atol=1e-4)
    for block in (first, second):
        assert not block.attention.output.weight.any()
        assert not block.mlp.down.weight.any()
        assert torch.allclose(block.mlp.up.weight.T @ block.mlp.up.weight, torch.eye(96), atol=1e-4)
        assert not block.attention.values.residual.down.weight.any()
        up = block.attention.values.residual.up.weight
        assert torch.allclose(up.T @ up, 0.01 * torch.eye(32), atol=1e-5)
        base = block.attention.values.residual.base
        assert base[0].item() == pytest.approx(0.93)
        assert base[-1].item() == pytest.approx(0.53)
        bound = 96**-0.5
        assert 0.95 * bound < block.attention.address.query.weight.abs().max() <= bound
    channel = torch.arange(96) / 96
    assert torch.allclose(first.attention.address.query_shift, 1 - channel**0.2, atol=1e-6)
    assert torch.allclose(second.attention.address.query_shift, 1 - channel**0.1, atol=1e-6)
    assert torch.allclose(second.attention.values.shift, 1 - channel**0.35, atol=1e-6)
    assert torch.allclose(second.mlp.shift, 1 - channel ** (0.5**4), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [({}, 162_942_096), ({"plan": [{"memory": {"type": "full"}}]}, 162_883_584)],
)
def test_parameter_counts_of_the_120m_models(settings, parameters):
    with torch.device("meta"):
        model = MeanbankForCausalLM(MeanbankConfig(**settings))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_parameter_count_of_the_350m_model():
    config = MeanbankConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=8)
    with torch.device("meta"):
        model = MeanbankForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == 407_026_048
    assert config.residual_scale == 0.5


def test_a_bank_starts_as_the_projection_of_each_token_alone():
    """At step 0 a bank layer gives what its (unshifted, residual-free) projection would give."""
    model = small(plan=[{"memory": {"type": "full"}}, {"where": [1], "values": {"type": "bank"}}])
    block = model.model.layers[1]
    inputs = block.attention_norm(model.model.stem.alone(model.model.embedding.weight))
    table = block.attention.values.table
    solution = torch.linalg.lstsq(inputs, table).solution  # W_V, which was dropped
    assert torch.allclose(inputs @ solution, table, atol=1e-4)
    bound = 96**-0.5
    # inputs have mean 0, so the solution lacks W_V's mean over inputs
    assert 0.9 * bound < solution.abs().max() <= 1.4 * bound
    assert block.attention.values.scale == 1
    assert not any("projection" in name for name, _ in block.attention.values.named_parameters())


@pytest.mark.parametrize("backbone", ["gptalpha2", "nanochat"])
@pytest.mark.parametrize(
    "part",
    [
        {"values": {"type": "bank"}},
        {"values": {"type": "bank", "table": "shared"}},
        {"values": {"type": "gated_additive"}},
        {"values": {"type": "mixed", "other": {"type": "bank"}}},
        {"values": {"type": "initial_embedding"}},
        {"memory": {"type": "kvm", "chunk_size": 8}},
        {"memory": {"type": "rwkv7"}},
    ],
    ids=str,
)
def test_models_that_differ_in_a_part_start_alike_in_all_others(backbone, part):
    full = {"memory": {"type": "full"}}
    plain = small(backbone=backbone, plan=[full])
    other = small(backbone=backbone, plan=[full, {"where": [1], **part}])
    ours, theirs = dict(plain.named_parameters()), dict(other.named_parameters())
    same = {name for name in ours if name in theirs and not name.startswith("model.layers.1.")}
    assert len(same) > 8
    if "rwkv7" not in str(part):  # which has start values of its own
        same |= {name for name in ours if name in theirs}
    assert [name for name in same if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("backbone", ["gptalpha2", "nanochat"])
def test_a_bank_takes_the_place_of_the_projection_that_would_be_there(backbone):
    full = {"memory": {"type": "full"}}
    plain = small(backbone=backbone, plan=[full])
    banked = small(backbone=backbone, plan=[full, {"where": [1], "values": {"type": "bank"}}])
    block = plain.model.layers[1]
    inputs = block.attention_norm(plain.model.stem.alone(plain.model.embedding.weight))
    expected = inputs @ block.attention.values.projection.weight.T
    torch.testing.assert_close(banked.model.layers[1].attention.values.table, expected)


def test_a_table_of_rwkv7_draws_by_its_name_too():
    rwkv7, bank = {"memory": "rwkv7"}, {"values": {"type": "bank"}}
    last = small(plan=[rwkv7, {"where": [1], **bank}])
    every = small(plan=[rwkv7, bank])
    one, other = (model.model.layers[1].attention.values.table for model in (last, every))
    assert torch.equal(one, other)


def test_two_models_in_a_row_start_differently():
    first, second = (MeanbankForCausalLM(small().config) for _ in range(2))
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)  # each after the same seed
    third = MeanbankForCausalLM(first.config)
    assert not torch.equal(second.lm_head.weight, third.lm_head.weight)


def test_a_model_without_numbers_draws_none():
    config = small().config
    expected = torch.rand(())
    torch.manual_seed(0)
    MeanbankForCausalLM(config)
    with torch.device("meta"):
        MeanbankForCausalLM(config)
    assert torch.equal(torch.rand(()), expected)


def test_places():
    assert layers_at("last_third", 12) == [8, 9, 10, 11]
    assert layers_at("last_third", 4) == [2, 3]
    assert layers_at("last_two_thirds", 6) == [2, 3, 4, 5]
    assert layers_at("second_half", 5) == [2, 3, 4]
    assert layers_at("every_other", 6) == [1, 3, 5]
    assert layers_at("every_other", 5) == [0, 2, 4]
    assert layers_at([-1, 0], 3) == [2, 0]


def test_later_rules_replace_earlier_ones():
    plan = expand_plan(
        [{"memory": "full"}, {"where": "odd", "memory": {"type": "sliding_window", "window": 9}}], 3
    )
    assert [entry["memory"]["type"] for entry in plan] == ["full", "sliding_window", "full"]
    assert plan[1]["memory"]["window"] == 9
    assert plan[1]["values"]["type"] == "projection"


def test_what_a_plan_leaves_open_follows_backbone_and_memory():
    """rotary_fraction, norms, shifts and residuals of every kind of layer on both backbones."""
    memories = ["kvm", "full", "ovq", "rwkv7"]
    plan = [{"where": [layer], "memory": memory} for layer, memory in enumerate(memories)]

    def resolved(backbone):
        layers = MeanbankConfig(num_hidden_layers=4, backbone=backbone, plan=plan).plans()
        rows = [
            (p.address.rotary_fraction, p.address.qk_norm, p.address.token_shift) for p in layers
        ]
        return rows, [(p.values.residual, p.values.shift) for p in layers]

    assert resolved("gptalpha2") == (
        [(0.5, "per_head", "learned")] * 2 + [(0.0, "none", "learned"), (0.0, "none", "none")],
        [("gated", "learned")] * 3 + [("gated", "none")],
    )
    assert resolved("nanochat") == (
        [(0.5, "per_head", "none"), (1.0, "per_head", "none")] + [(0.0, "none", "none")] * 2,
        [("none", "none")] * 3 + [("gated", "none")],
    )


def test_a_layer_never_takes_over_its_own_values_from_a_named_place():
    plan = [{"memory": "kvm"}, {"where": "even", "memory": "full"}, {"values": "first_layer"}]
    config = MeanbankConfig(num_hidden_layers=5, plan=plan)
    sources = [p.values.tag for p in config.plans()]
    assert sources == ["projection", "projection"] + ["first_layer"] * 3
    assert [place.publishes for place in config.places()] == [True, True, False, False, False]


def test_the_bov_papers_start_values():
    model = small(
        backbone="nanochat",
        plan=[
            {"memory": "full"},
            {"where": [1], "values": {"type": "bank", "table": "shared"}},
        ],
    )
    assert model.model.embedding.weight.std().item() == pytest.approx(0.8, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.001, rel=0.02)
    bound = (3 / 96) ** 0.5
    for block in model.model.layers:
        assert 0.95 * bound < block.attention.address.key.weight.abs().max() <= bound
        assert 0.38 * bound < block.mlp.up.weight.abs().max() <= 0.4 * bound
        assert not block.attention.output.weight.any()
        assert not block.mlp.down.weight.any()
    assert model.model.stem.mix == 0
    assert model.model.stem.gate.weight.abs().max() <= 24**-0.5
    block = model.model.layers[1]
    inputs = block.attention_norm(model.model.stem.alone(model.model.embedding.weight))
    solution = torch.linalg.lstsq(inputs, model.model.shared_table).solution
    assert torch.allclose(inputs @ solution, model.model.shared_table, atol=1e-4)
    assert 0.95 * bound < solution.abs().max() <= bound * 1.001


def test_start_values_of_mixtures():
    bank = {"type": "mixed", "other": {"type": "bank", "scale": "fixed"}}
    model = small(plan=[{"values": bank}, {"where": [1], "values": "gated_additive"}])
    mixed, additive = (block.attention.values for block in model.model.layers)
    assert (mixed.contextual_weight.item(), mixed.other_weight.item()) == (1.0, 0.0)
    block = model.model.layers[0]
    inputs = block.attention_norm(model.model.stem.alone(model.model.embedding.weight))
    assert torch.allclose(mixed.contextual.projection(inputs), mixed.other.table, atol=1e-6)
    bound = (3 / 96) ** 0.5
    assert 0.95 * bound < additive.table.abs().max() <= bound
    assert 0 <= additive.gate.weight.min() < additive.gate.weight.max() <= 0.02


def test_rwkv7_start_values():
    """The formulas of the baseline, written out channel by channel, in layers 0, 1 and 2 of 3."""
    model = small(num_hidden_layers=3, plan=[{"memory": "rwkv7"}])
    width, heads = 96, 3
    for layer, block in enumerate(model.model.layers):
        mix, ratio, depth = block.attention, 1 - layer / 3, layer / 2
        for i in (0, 1, 31, 32, 50, 95):
            lin = i / (width - 1) - 0.5
            z = -1 + 2 * (i % (width // heads)) / (width // heads - 1)
            zigzag = z * abs(z)
            decay = -5.5 + 6 * (i / (width - 1)) ** (1 + depth**0.3) + 2.5 * zigzag
            assert mix.decay.base[i].item() == pytest.approx(decay, abs=1e-5)
            assert mix.rate.base[i].item() == pytest.approx(
                -0.19 + 0.3 * zigzag + 0.4 * lin, abs=1e-6
            )
            assert mix.values.residual.base[i].item() == pytest.approx(0.73 - 0.4 * lin, abs=1e-6)
            assert mix.removal[i].item() == pytest.approx(0.71 - 0.1 * lin, abs=1e-6)
            for name, power in (("receptance", 0.2), ("decay", 0.9), ("value", 0.7)):
                start = 1 - (i / width) ** (power * ratio)
                assert mix.shifts[name][i].item() == pytest.approx(start, abs=1e-6)
        assert torch.allclose(mix.replacement, torch.full((width,), 1.02))
        assert torch.allclose(mix.bonus, torch.full((heads, width // heads), -0.04))
        assert torch.allclose(mix.norm.weight, torch.full((width,), ((1 + layer) / 3) ** 0.7))
        square = mix.receptance.weight @ mix.receptance.weight.T
        assert torch.allclose(square, torch.eye(width), atol=1e-5)
        square = mix.key.weight @ mix.key.weight.T
        assert torch.allclose(square, 0.01 * torch.eye(width), atol=1e-5)
        square = mix.values.projection.weight @ mix.values.projection.weight.T
        assert torch.allclose(square, torch.eye(width), atol=1e-5)
        assert not mix.output.weight.any()
        for part in (mix.decay, mix.rate, mix.gate, mix.values.residual):
            assert not part.down.weight.any()
            assert torch.allclose(
                part.up.weight.T @ part.up.weight, 0.01 * torch.eye(32), atol=1e-5
            )


def test_hybrids_refer_back_to_the_first_layer_of_their_kind():
    config = MeanbankConfig(
        num_hidden_layers=4,
        plan=[{"memory": "kvm"}, {"where": "even", "memory": "sliding_window"}],
    )
    assert [place.first_layer for place in config.places()] == [0, 1, 0, 1]
