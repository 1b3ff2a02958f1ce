"""The loss in pieces: equal to its specification, and never with the logits of all tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meanbank.core.conventions import IGNORED
from meanbank.model import MeanbankConfig, MeanbankForCausalLM
from meanbank.ops import cross_entropy as module
from meanbank.ops import linear_cross_entropy

SOFTCAPS = [None, 3.0]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", {"cpu": (1, 3), "other": (1, 3)})


def operands(tokens, vocabulary=11, width=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.3] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def with_gradients(hidden, weight, targets, slope=1.0, **settings):
    total, losses = linear_cross_entropy(hidden, weight, targets, **settings)
    gradients = torch.autograd.grad(slope * total, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(slope * total, (hidden, weight))
    assert all(map(torch.equal, gradients, again))
    return total.detach(), losses, *gradients


@given(st.integers(0, 20), st.sampled_from(SOFTCAPS), st.integers(0, 99), st.floats(-2, 2))
def test_equal_to_the_specification(tokens, softcap, seed, slope):
    arguments = operands(tokens, seed=seed)
    found = with_gradients(*arguments, slope, softcap=softcap)
    wanted = with_gradients(*arguments, slope, softcap=softcap, backend="reference")
    assert not found[1].requires_grad
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_gradcheck(softcap):
    hidden, weight, targets = operands(7)

    def total(hidden, weight):
        return linear_cross_entropy(hidden, weight, targets, softcap=softcap)[0]

    assert torch.autograd.gradcheck(total, (hidden, weight))


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_the_specification_in_its_dtype(dtype, softcap):
    arguments = operands(64, vocabulary=50, width=32, dtype=dtype)
    precise = [x.detach().double().requires_grad_() for x in arguments[:2]]
    exact = with_gradients(*precise, arguments[2], softcap=softcap)
    found = with_gradients(*arguments, softcap=softcap)
    wanted = with_gradients(*arguments, softcap=softcap, backend="reference")
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    for ours, theirs, true in zip(found, wanted, exact, strict=True):
        error, other = ((x.double() - true).norm() for x in (ours, theirs))
        assert error <= 2 * other + 1e-6 * true.norm()


def test_the_loss_of_what_is_nearly_certain_is_precise():
    """A loss of 5e-5 beside logits of 300: no digits are lost to their size."""
    weight = torch.eye(2)
    hidden = torch.tensor([[300.0, 290.0]])
    _, losses = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    torch.testing.assert_close(losses.item(), 4.5398e-5, rtol=2e-3, atol=0)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_autocast(softcap):
    arguments = operands(64, vocabulary=50, width=32, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(*arguments, softcap=softcap)
        wanted = with_gradients(*arguments, softcap=softcap, backend="reference")
    assert all(x.dtype == torch.float32 for x in found)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
    exact = with_gradients(*arguments, softcap=softcap)
    assert not torch.equal(found[0], exact[0])  # products were in half precision


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_ignored_does_not_matter(softcap, value):
    hidden, weight, targets = operands(8)
    targets[2] = IGNORED
    found = with_gradients(hidden, weight, targets, softcap=softcap)
    changed = hidden.detach().clone()
    changed[2] = 5.0
    other = with_gradients(changed.requires_grad_(), weight, targets, softcap=softcap)
    assert all(map(torch.equal, found, other))
    changed = hidden.detach().clone()
    changed[2] = value
    total, losses = linear_cross_entropy(changed, weight, targets, softcap=softcap)
    assert torch.equal(total, found[0]) and torch.equal(losses, found[1])


def test_only_the_loss_where_no_gradient_is_wanted():
    hidden, weight, targets = operands(8)
    total, losses = linear_cross_entropy(hidden, weight, targets)
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, targets)
    assert not alone[0].requires_grad
    assert torch.equal(total, alone[0]) and torch.equal(losses, alone[1])
    frozen, _ = linear_cross_entropy(hidden, weight.detach(), targets)
    (gradient,) = torch.autograd.grad(frozen, hidden)
    assert torch.equal(gradient, torch.autograd.grad(total, hidden, retain_graph=True)[0])
    frozen, _ = linear_cross_entropy(hidden.detach(), weight, targets)
    (gradient,) = torch.autograd.grad(frozen, weight)
    assert torch.equal(gradient, torch.autograd.grad(total, weight)[0])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("hidden_wanted", "weight_wanted", "grad", "count"),
    [(1, 1, True, 3), (1, 0, True, 2), (0, 1, True, 2), (0, 0, True, 1), (1, 1, False, 1)],
)
def test_only_the_products_of_gradients_that_are_wanted(
    hidden_wanted, weight_wanted, grad, count, monkeypatch
):
    monkeypatch.setattr(module, "PIECE", {"cpu": (1, 100)})  # one piece
    hidden, weight, targets = operands(8)
    hidden.requires_grad_(bool(hidden_wanted)), weight.requires_grad_(bool(weight_wanted))
    with torch.set_grad_enabled(grad), Products() as products:
        linear_cross_entropy(hidden, weight, targets)
    assert products.count == count


def test_autocast_leaves_double_precision_alone():
    arguments = operands(8)
    exact = with_gradients(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(*arguments)
        wanted = with_gradients(*arguments, backend="reference")
    assert all(map(torch.equal, found, exact))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="unknown backend 'all'"):
        linear_cross_entropy(*operands(3), backend="all")


class Largest(TorchDispatchMode):
    """The most numbers that a result has."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


def test_logits_of_all_tokens_are_never_there():
    arguments = operands(600, vocabulary=70)
    for backend, most in (("pieces", 600 * 5), ("reference", 600 * 70)):
        with Largest() as largest:
            with_gradients(*arguments, softcap=3.0, backend=backend)
        assert largest.numbers == most


def small_model(backbone, **settings):
    config = MeanbankConfig(
        backbone=backbone,
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        plan=[{"memory": {"type": "full"}}],
        **settings,
    )
    return MeanbankForCausalLM(config)


@pytest.mark.parametrize("backbone", ["nanochat", "gptalpha2"])
def test_a_model_gives_the_losses_of_its_logits(backbone):
    model = small_model(backbone)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=3)
    ids, targets = torch.randint(40, (2, 2, 9))
    targets[0, :3] = IGNORED
    wanted, losses = module.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
    found = model(ids, targets=targets, use_cache=False)
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(found.losses, losses.view(2, 9))
    as_tuple = model(ids, targets=targets, use_cache=False, return_dict=False)
    assert torch.equal(as_tuple[0], found.loss) and torch.equal(as_tuple[1], found.losses)
    ours, theirs = (
        torch.autograd.grad(loss, [p for n, p in model.named_parameters() if "head" in n])
        for loss in (found.loss, wanted)
    )
    torch.testing.assert_close(ours, theirs)


def test_a_head_that_is_replaced_or_watched_is_asked():
    model = small_model("nanochat")
    ids, targets = torch.randint(40, (2, 1, 9))
    plain = model(ids, targets=targets).loss
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *call: seen.append(call[-1].shape))
    torch.testing.assert_close(model(ids, targets=targets).loss, plain)
    assert seen == [(9, 40)]
    handle.remove()
    model.lm_head = nn.Sequential(model.lm_head, nn.Threshold(1e9, 0.0))  # all logits 0
    output = model(ids, targets=targets)
    torch.testing.assert_close(output.losses, torch.full((1, 9), 40.0).log())


@pytest.mark.parametrize(
    ("targets", "settings", "message"),
    [
        ((1, 8), {}, r"targets must have shape \(1, 9\), one a token, got \(1, 8\)"),
        ((1, 9), {"labels": torch.zeros(1, 9, dtype=torch.long)}, "leave out labels"),
        ((1, 9), {"logits_to_keep": 1}, "and logits_to_keep"),
    ],
)
def test_targets_that_do_not_fit(targets, settings, message):
    model = small_model("nanochat")
    ids = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        model(ids, targets=torch.zeros(targets, dtype=torch.long), **settings)
