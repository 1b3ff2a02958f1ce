"""The RWKV-7 recurrence: a loop as an oracle, chunks against tokens, extremes, wrong input."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from meanbank.ops.rwkv7 import rwkv7_recurrence
from meanbank.ops.rwkv7.chunked import CHUNK, rwkv7_chunked
from meanbank.ops.rwkv7.reference import rwkv7_reference

STRONGEST = -math.exp(-0.5)  # the strongest decay of RWKV-7, as log_decay
BACKENDS = ["chunked", "reference"]


def inputs(length, *, batch=2, heads=2, key_dim=6, value_dim=5, dtype=torch.float64):
    """Receptance, log_decay, key, value, removal_key and rate, and a state."""
    shape = (batch, heads, length, key_dim)
    return [
        torch.randn(shape, dtype=dtype),
        STRONGEST * torch.rand(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
        torch.randn(batch, heads, length, value_dim, dtype=dtype),
        F.normalize(torch.randn(shape, dtype=dtype), dim=-1),
        torch.rand(shape, dtype=dtype),
        torch.randn(batch, heads, value_dim, key_dim, dtype=dtype),
    ]


def oracle(r, log_decay, k, v, kk, rate, state):
    """One head at a time, with the transition matrix of each token written out."""
    outputs, state = torch.empty_like(v), state.clone()
    for b in range(r.shape[0]):
        for h in range(r.shape[1]):
            memory = state[b, h]
            for t in range(r.shape[2]):
                removal, replaced = kk[b, h, t], kk[b, h, t] * rate[b, h, t]
                transition = torch.diag(log_decay[b, h, t].exp()) - torch.outer(removal, replaced)
                memory = memory @ transition + torch.outer(v[b, h, t], k[b, h, t])
                outputs[b, h, t] = memory @ r[b, h, t]
            state[b, h] = memory
    return outputs, state


def with_gradients(function, tensors):
    """Outputs, last state, and the gradients of a fixed random combination of both."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    results = function(*tensors)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    loss = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
    return [*results, *torch.autograd.grad(loss, tensors)]


def relative_error(x, expected):
    return ((x - expected).norm() / (expected.norm() + 1e-30)).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_it_equals_the_loop(backend, length):
    tensors = inputs(length)
    for ours, theirs in zip(
        rwkv7_recurrence(*tensors, backend=backend), oracle(*tensors), strict=True
    ):
        assert (ours - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 150])
def test_chunks_equal_tokens_in_outputs_and_gradients(length):
    tensors = inputs(length)
    ours, theirs = (with_gradients(f, tensors) for f in (rwkv7_chunked, rwkv7_reference))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-10


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_gradients_of_chunks(length):
    tensors = [t.requires_grad_() for t in inputs(length, batch=1, key_dim=3, value_dim=2)]
    assert gradcheck(lambda *t: rwkv7_chunked(*t, chunk=4), tensors, eps=1e-6, atol=1e-6)


def test_gradients_of_the_reference():
    tensors = [t.requires_grad_() for t in inputs(5, batch=1, key_dim=3, value_dim=2)]
    assert gradcheck(rwkv7_reference, tensors, eps=1e-6, atol=1e-6)


@given(st.lists(st.integers(1, 2 * CHUNK), min_size=1, max_size=5), st.sampled_from(BACKENDS))
def test_any_split(splits, backend):
    *tensors, state = inputs(sum(splits))
    whole, expected = rwkv7_recurrence(*tensors, state)
    outputs = []
    for part in zip(*(t.split(splits, dim=2) for t in tensors), strict=True):
        output, state = rwkv7_recurrence(*part, state, backend=backend)
        outputs.append(output)
    assert (torch.cat(outputs, dim=2) - whole).abs().max() <= 1e-11
    assert (state - expected).abs().max() <= 1e-11


def test_no_state_is_zero():
    *tensors, state = inputs(20)
    for ours, theirs in zip(
        rwkv7_recurrence(*tensors), rwkv7_recurrence(*tensors, 0 * state), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_without_decay_and_removal_it_is_linear_attention():
    r, log_decay, k, v, kk, rate, _ = inputs(50)
    output, state = rwkv7_recurrence(r, 0 * log_decay, k, v, kk, 0 * rate)
    assert (output - (r @ k.mT).tril() @ v).abs().max() <= 1e-11
    assert (state - v.mT @ k).abs().max() <= 1e-11


def test_full_removal_replaces_the_value_of_a_key():
    """Key = removal key of norm 1 and rate 1: the delta rule, the last value is read back."""
    _, log_decay, _, v, kk, rate, state = inputs(50)
    output, _ = rwkv7_recurrence(kk, 0 * log_decay, kk, v, kk, torch.ones_like(rate), state)
    assert (output - v).abs().max() <= 1e-12


DECAYS = {
    "none": torch.zeros_like,
    "strongest": lambda x: torch.full_like(x, STRONGEST),
    "either": lambda x: STRONGEST * (torch.rand_like(x) < 0.5),
    "by channel": lambda x: STRONGEST * (torch.arange(x.shape[-1]) % 2).to(x).expand_as(x),
    "beyond RWKV-7": lambda x: torch.full_like(x, -2.5),
}


@pytest.mark.parametrize("removal", ["random", "the same key, fully"])
@pytest.mark.parametrize("decay", DECAYS)
def test_extremes_in_fp32(decay, removal):
    tensors = inputs(300, batch=1, heads=1, key_dim=32, value_dim=32, dtype=torch.float32)
    tensors[1] = DECAYS[decay](tensors[1])
    if removal != "random":
        tensors[4] = tensors[4][:, :, :1].expand_as(tensors[4])
        tensors[5] = torch.ones_like(tensors[5])
    results = with_gradients(rwkv7_chunked, tensors)
    expected = with_gradients(rwkv7_reference, [t.double() for t in tensors])
    for index, (ours, exact) in enumerate(zip(results, expected, strict=True)):
        # the gradient of log_decay is a difference of much larger numbers far outside the range
        limit = 1e-4 if decay == "beyond RWKV-7" and index == 3 else 5e-6
        assert relative_error(ours, exact) <= limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(backend, dtype):
    *tensors, state = inputs(40, dtype=torch.float32)
    half = [t.to(dtype) for t in tensors]
    output, last = rwkv7_recurrence(*half, state, backend=backend)
    assert output.dtype == dtype
    assert last.dtype == torch.float32
    exact, exact_last = rwkv7_recurrence(*(t.float() for t in half), state, backend=backend)
    assert torch.equal(output, exact.to(dtype))
    assert torch.equal(last, exact_last)


def test_one_precise_input_makes_everything_precise():
    *tensors, state = inputs(40)
    tensors = [t.float() for t in tensors]
    tensors[1] = tensors[1].double()
    output, last = rwkv7_recurrence(*tensors, state)
    assert output.dtype == torch.float32
    assert last.dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend):
    tensors = inputs(40, dtype=torch.float32)
    plain = rwkv7_recurrence(*tensors, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = rwkv7_recurrence(*tensors, backend=backend)
    for ours, theirs in zip(mixed, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.zeros(2, 2, 8, 6), "receptance must agree with key"),
        (1, torch.zeros(2, 2, 9, 5), "log_decay must agree with key"),
        (3, torch.zeros(2, 1, 9, 5), "value must agree with key"),
        (4, torch.zeros(2, 9, 6), "removal_key must be a floating-point tensor"),
        (5, torch.zeros(2, 2, 9, 6, dtype=torch.long), "rate must be a floating-point tensor"),
        (6, torch.zeros(2, 2, 6, 5), "state must be a floating-point tensor of shape"),
        (6, torch.zeros(1, 2, 5, 6), "another batch"),
    ],
)
def test_wrong_input_is_one_clear_line(position, wrong, message):
    tensors = inputs(9, dtype=torch.float32)
    tensors[position] = wrong
    with pytest.raises(ValueError, match=message) as error:
        rwkv7_recurrence(*tensors)
    assert "\n" not in str(error.value)


def test_unknown_backends_and_no_tokens_are_refused():
    with pytest.raises(ValueError, match="choose one of chunked"):
        rwkv7_recurrence(*inputs(9), backend="chunk")
    with pytest.raises(ValueError, match="at least one token"):
        rwkv7_recurrence(*inputs(0))
