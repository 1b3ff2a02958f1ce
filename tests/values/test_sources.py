"""Each value source against its formula, and published values against a layer's own."""

import pytest
import torch
import torch.nn.functional as F

from meanbank.core.config import build
from meanbank.core.context import Context
from meanbank.core.geometry import Geometry
from meanbank.core.layout import Layout
from meanbank.model.backbones import BACKBONES
from meanbank.model.plan import LayerPlan
from meanbank.values import Place
from tests.conformance.models import SOURCES

GEOMETRY = Geometry(
    hidden_size=14, num_heads=4, num_kv_heads=2, key_dim=4, value_dim=3, rotary_dim=0
)
WIDTH = 6
IDS = torch.tensor([[3, 0, 3, 1, 4]])


def source(settings, layer=1, publishes=False, backbone="nanochat"):
    plan = build(LayerPlan, {"memory": "full", "values": settings})
    config = plan.resolved(BACKBONES[backbone].conventions).values
    place = Place(layer=layer, num_layers=2, first_layer=0, vocabulary=5, publishes=publishes)
    torch.manual_seed(0)
    module = config.build(GEOMETRY, place).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


def tensors():
    torch.manual_seed(1)
    x, start = torch.randn(2, 1, 5, 14, dtype=torch.float64)
    first = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    shared = torch.randn(5, WIDTH, dtype=torch.float64)
    return x, start, Context(IDS, start, Layout.uniform(1, 0, 5), {0: first}, shared)


def values_of(module):
    x, start, context = tensors()
    dense = module(x, start, context, None)[0].dense()
    assert dense.shape == (1, 2, 5, 3)
    return dense.transpose(1, 2).flatten(2)


def linear(x, module):
    return x @ module.weight.T


def test_projection_and_scale():
    x, _, _ = tensors()
    module = source({"type": "projection", "scale": "learned"})
    assert torch.allclose(values_of(module), module.scale * linear(x, module.projection))


def test_linear_residual():
    x, _, context = tensors()
    module = source({"type": "projection", "residual": "linear"})
    share = module.residual.share
    expected = (1 - share) * linear(x, module.projection) + share * context.first_values[0]
    assert torch.allclose(values_of(module), expected)


def test_first_layer():
    _, _, context = tensors()
    first = context.first_values[0]
    assert torch.equal(values_of(source({"type": "first_layer", "scale": "fixed"})), first)
    module = source({"type": "first_layer"})
    assert torch.allclose(values_of(module), module.scale * first)
    module = source({"type": "first_layer", "scale": "per_head"})
    heads = module.scale.repeat_interleave(3)  # one number for each head's three channels
    assert torch.allclose(values_of(module), heads * first)


def test_initial_embedding():
    _, start, _ = tensors()
    module = source({"type": "initial_embedding"})
    assert torch.allclose(values_of(module), module.scale * linear(start, module.projection))


def test_banks():
    _, _, context = tensors()
    module = source({"type": "bank"})
    assert torch.allclose(values_of(module), module.scale * F.embedding(IDS, module.table))
    module = source({"type": "bank", "table": "shared", "scale": "fixed"})
    assert torch.equal(values_of(module), F.embedding(IDS, context.shared_table))
    assert not list(module.parameters())


@pytest.mark.parametrize("coefficients", ["learned", "fixed"])
def test_mixtures(coefficients):
    x, start, context = tensors()
    others = {
        "first_layer": lambda module: context.first_values[0],
        "initial_embedding": lambda module: linear(start, module.contextual.projection),
        "bank": lambda module: F.embedding(IDS, module.other.table),
    }
    for tag, other in others.items():
        settings = {"type": "mixed", "other": {"type": tag, "scale": "fixed"}}
        module = source({**settings, "coefficients": coefficients})
        a, b = module.contextual_weight, module.other_weight
        if coefficients == "fixed":
            assert (a, b) == (0.5, 0.5)
        expected = a * linear(x, module.contextual.projection) + b * other(module)
        assert torch.allclose(values_of(module), expected), tag


def test_gated_additive():
    x, _, _ = tensors()
    module = source({"type": "gated_additive"})
    gate = 3 * torch.sigmoid(x[..., :12] @ module.gate.weight.T)
    added = gate.repeat_interleave(3, dim=-1) * F.embedding(IDS, module.table)
    assert torch.allclose(values_of(module), linear(x, module.contextual.projection) + added)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", [n for n in SOURCES if "first_layer" not in n])
def test_in_layer_0_publishing_changes_nothing(name, backbone):
    """There the layer's input is x0, so that what others read is what it computes anyway."""
    alone = source(SOURCES[name], layer=0, backbone=backbone)
    read = source(SOURCES[name], layer=0, publishes=True, backbone=backbone)
    x, _, context = tensors()
    published = read.publish(x, x, context)
    context = Context(IDS, x, context.layout, {0: published}, context.shared_table)
    dense = read(x, x, context, None)[0].dense()
    nothing = Context(IDS, x, context.layout, {}, context.shared_table)
    assert torch.allclose(dense, alone(x, x, nothing, None)[0].dense(), atol=1e-12)
