"""Roles of parameters: one each, on every memory, value source and backbone."""

import itertools
import re

import pytest
import torch
from torch import nn

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.memory import MemoryConfig
from meanbank.model.backbones import BACKBONES
from meanbank.model.roles import NAMED, Role, members_of, pick, role_of
from meanbank.training import Recipe
from meanbank.training.recipes.kvm import rank_at
from tests.conformance.models import SOURCES

VOCABULARY = 37  # no other dimension
MATRICES = (
    r"attention\.(address\.(query|key)|receptance|key|output|memory\.gate)\.weight"
    r"|attention\.values\.(contextual\.)?(projection|residual\.down)\.weight"
    r"|attention\.(decay|rate|gate)\.down\.weight|mlp\.(up|down)\.weight"
)
# What the parameters of each role are called, without their layer; a vector is anything else.
EXPECTED = {
    Role.EMBEDDING: r"model\.embedding\.weight",
    Role.HEAD: r"lm_head\.weight",
    Role.SMEAR: r"model\.stem\.(gate\.weight|mix)",
    Role.MATRIX: MATRICES,
    Role.LOW_RANK: r"attention\.(values\.(contextual\.)?residual|decay|rate|gate)\.up\.weight",
    Role.VALUE_GATE: r"attention\.values\.gate\.weight",
    Role.TABLE: r"attention\.values\.(other\.)?table|model\.shared_table",
    Role.SCALE: r"attention\.values\.scale",
    Role.HEAD_SCALE: r"attention\.values\.scale",
    Role.CONTEXTUAL_WEIGHT: r"attention\.values\.contextual_weight",
    Role.OTHER_WEIGHT: r"attention\.values\.other_weight",
}


def make_model(memory: str, source: str, backbone: str, hidden_size: int = 32):
    config = MeanbankConfig(
        backbone=backbone,
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        num_hidden_layers=3,
        num_attention_heads=2,
        plan=[{"memory": memory}, {"where": [1, 2], "values": SOURCES[source]}],
    )
    with torch.device("meta"):
        return MeanbankForCausalLM(config)


def below_layer(name: str) -> str:
    return re.sub(r"^model\.layers\.\d+\.", "", name)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("memory", MemoryConfig.family)
def test_every_parameter_has_one_role_and_one_group(memory, backbone):
    for source in SOURCES:
        model = make_model(memory, source, backbone)
        linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
        members = members_of(model)
        assert [member.name for member in members] == [n for n, _ in model.named_parameters()]
        for name, parameter, role in members:
            lines = [
                line
                for line, pattern, dimensions in NAMED
                if dimensions in (None, parameter.ndim) and re.fullmatch(pattern, name)
            ]
            assert len(lines) <= 1, name
            over_vocabulary = role in (Role.EMBEDDING, Role.HEAD, Role.TABLE)
            assert over_vocabulary == (VOCABULARY in parameter.shape), name
            if role is Role.VECTOR:
                assert parameter.ndim < 2 or name.endswith("attention.bonus")
            else:
                assert re.fullmatch(EXPECTED[role], below_layer(name)), name
            if role in (Role.MATRIX, Role.LOW_RANK, Role.VALUE_GATE):
                assert parameter in linear, name
        for recipe in Recipe.family.values():
            groups = recipe().optimizer(model, 100).param_groups
            grouped = [id(parameter) for group in groups for parameter in group["params"]]
            assert sorted(grouped) == sorted(map(id, model.parameters())), recipe.tag


def test_every_role_occurs():
    models = (
        make_model(memory, source, backbone)
        for memory, source, backbone in itertools.product(["kvm", "rwkv7"], SOURCES, BACKBONES)
    )
    assert {member.role for model in models for member in members_of(model)} == set(Role)


def test_scales_are_told_apart_by_their_dimensions():
    def scales(source, role):
        found = pick(members_of(make_model("full", source, "nanochat")), role)
        return [tuple(member.parameter.shape) for member in found]

    assert scales("first_layer", Role.SCALE) == [(), ()]
    assert scales("first_layer", Role.HEAD_SCALE) == []
    assert scales("first_layer_per_head", Role.HEAD_SCALE) == [(2,), (2,)]
    assert scales("first_layer_per_head", Role.SCALE) == []


@pytest.mark.parametrize("hidden_size", [64, 768, 1024, 1536])
def test_ranks_follow_the_width_as_the_modules_have_them(hidden_size):
    factors = pick(
        members_of(make_model("rwkv7", "projection_gated", "gptalpha2", hidden_size)), Role.LOW_RANK
    )
    assert len({below_layer(member.name) for member in factors}) == 4
    for member in factors:
        assert rank_at(member.name, hidden_size) == member.parameter.shape[1], member.name


def test_frozen_parameters_are_left_out():
    model = make_model("full", "bank", "nanochat")
    model.model.embedding.weight.requires_grad_(False)
    assert not pick(members_of(model), Role.EMBEDDING)


def test_a_matrix_that_is_no_weight_needs_a_role():
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.codes has no role"):
        role_of("model.layers.0.attention.codes", torch.zeros(2, 3))
