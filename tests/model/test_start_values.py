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
    inputs = block.attention_norm(model.model.embedding_norm(model.model.embedding.weight))
    table = block.attention.values.table
    solution = torch.linalg.lstsq(inputs, table).solution  # W_V, which was dropped
    assert torch.allclose(inputs @ solution, table, atol=1e-4)
    bound = 96**-0.5
    # inputs have mean 0, so the solution lacks W_V's mean over inputs
    assert 0.9 * bound < solution.abs().max() <= 1.4 * bound
    assert block.attention.values.scale == 1
    assert not any("projection" in name for name, _ in block.attention.values.named_parameters())


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
    assert plan[1]["values"] == {"type": "projection", "residual": "gated"}


def test_hybrids_refer_back_to_the_first_layer_of_their_kind():
    config = MeanbankConfig(
        num_hidden_layers=4,
        plan=[{"memory": "kvm"}, {"where": "even", "memory": "sliding_window"}],
    )
    assert [place.first_layer for place in config.places()] == [0, 1, 0, 1]
