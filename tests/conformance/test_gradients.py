"""Finite differences against autograd in fp64, for every memory and every value source."""

import pytest
import torch

from meanbank.core.config import build
from meanbank.core.context import Context
from meanbank.core.geometry import Geometry
from meanbank.core.layout import Layout, Span
from meanbank.core.values import DenseValues
from meanbank.model.backbones import BACKBONES
from meanbank.model.plan import LayerPlan
from meanbank.model.rwkv7 import TimeMix
from meanbank.values import Place
from tests.conformance.models import CHUNK, MEMORIES, SOURCES

LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 4 * CHUNK + 3]
SOFTMAX = [name for name in MEMORIES if name != "rwkv7"]


def geometry(rotary_dim: int = 4, kv_heads: int = 1) -> Geometry:
    return Geometry(
        hidden_size=6,
        num_heads=2,
        num_kv_heads=kv_heads,
        key_dim=8,
        value_dim=3,
        rotary_dim=rotary_dim,
    )


class Called(torch.nn.Module):
    """A module with `function`, which calls it, for its forward."""

    def __init__(self, module, function) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs):
        return self.function(*inputs)


def check(module, function, inputs) -> None:
    """Compare the gradients of every input and every parameter with finite differences."""
    called = Called(module, function)
    names = [name for name, _ in called.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in called.parameters()]

    def outputs(*tensors):
        own = dict(zip(names, tensors[: len(names)], strict=True))
        return torch.func.functional_call(called, own, tensors[len(names) :])

    assert torch.autograd.gradcheck(outputs, [*parameters, *inputs], fast_mode=True)


def randomised(module):
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return module


@pytest.mark.parametrize("memory", SOFTMAX)
@pytest.mark.parametrize("length", LENGTHS)
def test_memories(memory, length):
    torch.manual_seed(3)
    sizes = geometry()
    module = randomised(build(LayerPlan, {"memory": MEMORIES[memory]}).memory.build(sizes))
    shapes = [(2, 2, length, 8), (2, 1, length, 8), (2, 1, length, 3), (2, length, 6)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def attend(query, key, value, gate_input):
        span = Span(0, length)
        output, state = module(query, key, DenseValues(value), gate_input, None, span)
        held = [tensor for tensor in state.tensors() if tensor.requires_grad]
        return (output, *held)

    check(module, attend, inputs)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("length", LENGTHS)
def test_value_sources(source, length):
    torch.manual_seed(3)
    backbone = BACKBONES["gptalpha2"]
    plan = build(LayerPlan, {"memory": "full", "values": SOURCES[source]})
    config = plan.resolved(backbone.conventions).values
    place = Place(layer=1, num_layers=2, first_layer=0, vocabulary=5)
    module = randomised(config.build(geometry(kv_heads=2), place))
    ids = torch.randint(5, (2, length))
    shapes = [(2, length, 6), (2, length, 6), (2, length, 6), (5, 6)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def values(x, start, first, shared):
        context = Context(ids, start, Layout.uniform(2, 0, length), {0: first}, shared)
        dense = module(x, start, context, None)[0].dense()
        return dense, module.publish(x, start, context)

    check(module, values, inputs)


@pytest.mark.parametrize("length", [*LENGTHS, 33])
def test_the_time_mix(length):
    torch.manual_seed(3)
    backbone = BACKBONES["gptalpha2"]
    plan = build(LayerPlan, {"memory": "rwkv7"}).resolved(backbone.conventions)
    place = Place(layer=1, num_layers=2, first_layer=0, vocabulary=5)
    module = randomised(TimeMix(plan, geometry(0, kv_heads=2), place, backbone))
    inputs = [torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def mix(x, first):
        context = Context(None, x, Layout.uniform(2, 0, length), {0: first})
        output, state = module(x, None, context, None)
        return output, state.matrix

    check(module, mix, inputs)
