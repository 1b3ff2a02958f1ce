"""`torch.compile`: equal to eager, and compiled anew at most twice over a hundred lengths.

Memory operators loop over chunks in Python, so they run outside the compiled graphs (one break a
layer); what is around them is compiled once for all lengths. Most tests use backends that need no
C++ compiler: what is traced, guarded and differentiated is the same.
"""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from tests.model.hf_models import SYSTEMS, gradients, make_system, random_ids

RECOMPILATIONS = 2
# Tracing takes seconds a system; the others run with -m slow.
systems = pytest.mark.parametrize(
    "system",
    [
        name if name == "kvm_bank" else pytest.param(name, marks=pytest.mark.slow)
        for name in SYSTEMS
    ],
)


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Backend:
    """Runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def compilations(calls) -> list[int]:
    """The numbers of the calls that compiled something."""
    backend, before, when = Backend(), 0, []
    for number, _ in enumerate(calls(backend)):
        if backend.graphs > before:
            when.append(number)
        before = backend.graphs
    return when


@systems
def test_training_at_a_hundred_lengths(system):
    model = make_system(system).train()

    def calls(backend):
        compiled = torch.compile(model, backend=backend)
        for length in range(2, 102):
            ids = random_ids(2, length)
            logits = compiled(ids, use_cache=False).logits
            if length % 10 == 0:
                assert torch.allclose(logits, model(ids, use_cache=False).logits, atol=1e-6)
            yield logits

    assert len(compilations(calls)) <= 1 + RECOMPILATIONS


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_decoding_a_hundred_tokens(system):
    model, ids = make_system(system), random_ids(2, 100)
    expected = model(ids).logits

    def calls(backend):
        compiled, cache = torch.compile(model, backend=backend), model.model.new_cache()
        with torch.no_grad():
            for at in range(100):
                output = compiled(ids[:, at : at + 1], cache=cache)
                assert torch.allclose(output.logits[:, 0], expected[:, at], atol=1e-5)
                yield output

    assert len(compilations(calls)) <= 1 + RECOMPILATIONS


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(system, checkpointing):
    model, ids = make_system(system).train(), random_ids(2, 19)
    expected = gradients(model, ids, use_cache=False)
    if checkpointing:
        model.activation_checkpointing_enable()
    compiled = torch.compile(model, backend="aot_eager")
    for name, gradient in gradients(compiled, ids, use_cache=False).items():
        wanted = expected[name.removeprefix("_orig_mod.")]
        assert (gradient - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max()), name


@pytest.mark.slow
def test_padding_and_positions_fall_back_rightly():
    model, ids = make_system("kvm_bank"), random_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :11] = 0, 0
    compiled = torch.compile(model, backend="eager")
    expected = model(ids, attention_mask=mask).logits
    assert torch.allclose(compiled(ids, attention_mask=mask).logits, expected, atol=1e-6)
    with pytest.raises(ValueError, match="contradict"):
        compiled(ids, position_ids=torch.ones_like(ids))
    for wrong in (-1, 40):
        with pytest.raises(IndexError):
            compiled(torch.full((1, 4), wrong))
    text = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    again = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(again, text)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++", "clang"))), reason="no C++ compiler"
)
def test_the_default_backend():
    model, ids = make_system("kvm_bank").train(), random_ids(2, 19)
    expected = gradients(model, ids, use_cache=False)
    compiled = torch.compile(model)
    for name, gradient in gradients(compiled, ids, use_cache=False).items():
        wanted = expected[name.removeprefix("_orig_mod.")]
        assert (gradient - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max()), name
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.allclose(compiled(ids).logits, logits, atol=1e-5)
