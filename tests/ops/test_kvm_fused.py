"""The fused KVM backend against the reference: numbers, choices, gradients, and what it holds."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meanbank.ops import kvm_attention
from meanbank.ops.kvm import api, fused_forward
from meanbank.ops.kvm.common import KVMWeights, gather, position_free
from meanbank.ops.kvm.fused_keys import CompressedKeys, WholeKeys
from meanbank.ops.kvm.options import KVMOptions
from tests.ops.test_kvm import inputs

SEQUENCES = ("query", "key", "value", "merge_gate")
# bytes, with which heads are read alone, some together, or all at once
CACHES = st.sampled_from([1, 400, fused_forward.CACHE])
LARGE = {"rotary_dim": 32, "chunk_size": 16, "budget": lambda seen: 3 * seen**0.5}


def run(backend, arguments, settings, splits, memory=None):
    """Outputs, the last memory and the trace of a sequence in calls of those lengths."""
    outputs, trace, start = [], [], 0
    for length in splits:
        part = {
            n: t[:, :, start : start + length] if n in SEQUENCES else t
            for n, t in arguments.items()
        }
        output, memory = kvm_attention(
            **part, **settings, memory=memory, return_memory=True, trace=trace, backend=backend
        )
        outputs.append(output)
        start += length
    return torch.cat(outputs, dim=2), memory, trace


def gradients(backend, arguments, settings, splits, weigh_memory=True):
    """As `run`, and the gradient for each argument of fixed random sums of all results."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in arguments.items()}
    output, memory, trace = run(backend, leaves, settings, splits)
    generator = torch.Generator().manual_seed(0)
    loss = 0
    for tensor in [output, *(memory.tensors() if weigh_memory else ())]:
        weight = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        loss = loss + (tensor * weight.to(tensor.dtype)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = (
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), found, strict=True)
    )
    return output.detach(), memory, dict(zip(leaves, zeros, strict=True)), trace


def same_choices(ours, theirs):
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.start == their.start
        assert torch.equal(our.appended, their.appended)
        assert (our.route is None) == (their.route is None)
        assert our.route is None or torch.equal(our.route, their.route)
        assert our.novelty is None or torch.allclose(
            our.novelty.double(), their.novelty.double(), atol=1e-3
        )


SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "key_dim": st.sampled_from([8, 9, 12]),
    }
)
SETTINGS = st.fixed_dictionaries(
    {
        "rotary_dim": st.sampled_from([0, 2, 5, 6, 7]),
        "chunk_size": st.sampled_from([2, 3, 5, 8]),
        "window_chunks": st.integers(1, 3),
        "sink": st.integers(0, 1),
        "budget": st.sampled_from([3, 12, lambda seen: 2 * seen**0.5, lambda seen: seen]),
        "value_scale": st.sampled_from(["radius", "count", "chunk_count"]),
        "gated_writes": st.sampled_from(
            [("merge",), (), ("append", "merge"), ("initial", "append", "merge")]
        ),
        "gated_parts": st.sampled_from([("key", "value"), ("key",), ("value",)]),
        "append": st.sampled_from(["novelty", "random", "recent", "gate"]),
        "read_key": st.sampled_from(["normalized", "normalized", "raw"]),
        "stored_rotary": st.sampled_from(["zeroed", "zeroed", "zeroed_again", "kept"]),
    }
)


@hypothesis_settings(max_examples=120)
@given(
    sizes=SIZES,
    settings=SETTINGS,
    splits=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    gate=st.booleans(),
    weigh_memory=st.booleans(),
    cache=CACHES,
)
def test_it_equals_the_reference(sizes, settings, splits, gate, weigh_memory, cache):
    sizes = dict(sizes)
    heads = sizes.pop("group") * sizes["kv_heads"]
    arguments = inputs(sum(splits), heads=heads, **sizes)
    if not gate and settings["append"] != "gate":
        del arguments["merge_gate"]
    with patch.object(fused_forward, "CACHE", cache):
        results = [
            gradients(b, arguments, settings, splits, weigh_memory) for b in ("fused", "reference")
        ]
    (output, memory, grads, trace), (expected, theirs, their_grads, their_trace) = results
    assert (output - expected).abs().max() <= 1e-10
    for our, their in zip(memory.tensors(), theirs.tensors(), strict=True):
        assert our.shape == their.shape and our.dtype == their.dtype
        assert (our - their).abs().max() <= 1e-10
    same_choices(trace, their_trace)
    for our, their in zip(trace, their_trace, strict=True):
        for rows, expected_rows in zip(our.rows.tensors(), their.rows.tensors(), strict=True):
            assert (rows - expected_rows).abs().max() <= 1e-10
    for name, grad in grads.items():
        expected_grad = their_grads[name]
        assert (grad - expected_grad).abs().max() <= 1e-10 * (1 + expected_grad.abs().max()), name


@pytest.mark.parametrize("stored_rotary", ["zeroed", "zeroed_again"])
def test_compressed_keys_are_the_keys(stored_rotary):
    """The same stored keys, sums, similarities and norms, in fewer numbers."""
    weight = 1 + 0.3 * torch.randn(16, dtype=torch.float64)
    bias = 0.3 * torch.randn(16, dtype=torch.float64)
    options = KVMOptions(rotary_dim=8, budget=lambda seen: 1, stored_rotary=stored_rotary)
    small, whole = (kind(weight, bias, options) for kind in (CompressedKeys, WholeKeys))
    key, query = (torch.randn(2, 5, 16, dtype=torch.float64) for _ in range(2))
    scale = torch.rand(2, 1, 1, dtype=torch.float64)

    def sums(keys):
        return (keys.stored(key) * torch.arange(1.0, 6)[:, None]).cumsum(dim=1)

    def numbers(keys):
        rows = sums(keys)
        normalised = keys.normalised(rows)
        lengths = keys.normalised_lengths(normalised)
        met = keys.tokens(keys.stored(key)) @ normalised.mT
        read = keys.reader(scale, torch.float64)(query, slice(None)) @ normalised.mT
        return keys.whole(rows), lengths, met, read, keys.lengths(keys.stored(key))

    for ours, expected in zip(numbers(small), numbers(whole), strict=True):
        assert (ours - expected).abs().max() <= 1e-12
    assert small.normalised_width == 16 - 8 + (4 if stored_rotary == "zeroed" else 2)
    names = ("norm_weight", "norm_bias")
    reference = KVMWeights(weight, bias, *(torch.ones(1) for _ in names))
    assert torch.allclose(whole.normalised(sums(whole)), reference.norm(sums(whole)))


@hypothesis_settings(max_examples=100)
@given(
    sizes=SIZES,
    settings=SETTINGS,
    splits=st.lists(st.integers(1, 24), min_size=2, max_size=5),
    other_weights=st.booleans(),
    cache=CACHES,
)
@torch.no_grad()
def test_it_goes_on_from_any_memory_without_gradients(
    sizes, settings, splits, other_weights, cache
):
    """Its own, or the reference's, be it made with the weights at hand or with others."""
    sizes = dict(sizes)
    heads = sizes.pop("group") * sizes["kv_heads"]
    arguments = inputs(sum(splits), heads=heads, **sizes)
    first, rest = splits[0], splits[1:]
    begin = {n: t[:, :, :first] if n in SEQUENCES else t for n, t in arguments.items()}
    if other_weights:
        for name in ("norm_weight", "norm_bias"):
            begin[name] = torch.randn_like(begin[name])
    later = {n: t[:, :, first:] if n in SEQUENCES else t for n, t in arguments.items()}
    for maker in ("fused", "reference"):
        _, start = kvm_attention(**begin, **settings, return_memory=True, backend=maker)
        with patch.object(fused_forward, "CACHE", cache):
            (output, memory, trace), (expected, theirs, their_trace) = (
                run(b, later, settings, rest, start) for b in ("fused", "reference")
            )
        assert (output - expected).abs().max() <= 1e-10
        for our, their in zip(memory.tensors(), theirs.tensors(), strict=True):
            assert (our - their).abs().max() <= 1e-10
        same_choices(trace, their_trace)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_later_tokens_get_no_weight_whatever_their_scores(count, dtype):
    scores = torch.randn(2, 3, count, 9).to(dtype)
    scores[0, 0, 0, -count:] = torch.tensor([math.nan, 1, -0.0, -math.inf, math.inf, math.nan])[
        -count:
    ]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    expected = scores.clone()
    expected[..., -count:].masked_fill_(later, -math.inf)
    fused_forward.Future(6, dtype, scores.device).hide(scores)
    assert torch.equal(scores.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("heads", [1, 5, 8])
@pytest.mark.parametrize("score_bytes", [1, 2**19, 2**20, 2**22, 2**30])
def test_as_many_heads_at_once_as_a_cache_holds(heads, score_bytes):
    at_once = fused_forward.heads_at_once(torch.device("cpu"), heads, score_bytes)
    room = fused_forward.CACHE * torch.get_num_threads()
    assert at_once == 1 or at_once * score_bytes <= room
    assert -(-heads // at_once) == -(-heads // max(1, room // score_bytes))  # no more turns
    assert fused_forward.heads_at_once(torch.device("cuda"), heads, score_bytes) == heads


@pytest.mark.parametrize("bias", ["some", "none"])
@pytest.mark.parametrize("stored_rotary", ["zeroed", "zeroed_again"])
def test_sums_of_whole_keys_are_packed_if_they_can_be(stored_rotary, bias):
    weight, other = 1 + 0.3 * torch.randn(2, 16)
    options = KVMOptions(rotary_dim=8, budget=lambda seen: 1, stored_rotary=stored_rotary)
    keys = CompressedKeys(weight, torch.randn(16) * (bias == "some"), options)
    stored = keys.stored(torch.randn(2, 300, 16))
    rows = keys.whole(torch.stack([stored.cumsum(dim=1)[:, 99], stored.sum(dim=1)], dim=1))
    packed = keys.packed(rows)
    assert packed is not None
    assert (keys.whole(packed) - rows).abs().max() <= 1e-6 * rows.abs().max()
    with_nan = rows.clone()
    with_nan[0, 0] = math.nan  # tells nothing of the others
    again = keys.packed(with_nan)
    assert again is not None
    assert torch.equal(again[1], packed[1])
    rows[1, 1, 3] += 1e-3 * rows[1, 1].abs().max()
    assert keys.packed(rows) is None
    assert CompressedKeys(other, keys.bias, options).packed(with_nan) is None or (
        stored_rotary == "zeroed_again"
    )


@pytest.mark.parametrize("stored_rotary", ["zeroed", "zeroed_again"])
@pytest.mark.parametrize("value_scale", ["radius", "count"])
def test_gradcheck_of_compressed_keys(stored_rotary, value_scale):
    arguments = inputs(17, key_dim=8, value_dim=3)
    settings = {
        "rotary_dim": 5,
        "chunk_size": 3,
        "budget": lambda seen: 2 * seen**0.5,
        "stored_rotary": stored_rotary,
        "value_scale": value_scale,
        "gated_writes": ("initial", "append", "merge"),
    }

    def function(*tensors):
        given = dict(zip(arguments, tensors, strict=True))
        output, memory = kvm_attention(**given, **settings, return_memory=True, backend="fused")
        return output, *memory.rows.tensors()

    tensors = [t.requires_grad_() for t in arguments.values()]
    assert gradcheck(function, tensors, eps=1e-6, atol=1e-6, fast_mode=True)


# ------------------------------------------------------------------------------------ precision


def rms(x):
    return x.double().square().mean().sqrt()


def errors(arguments, settings, exact):
    """Squared errors of both backends, of outputs and all gradients."""
    for backend in ("fused", "reference"):
        output, _, grads, trace = gradients(backend, arguments, settings, [300], False)
        same_choices(trace, exact[3])
        found = {"output": output, **grads}
        yield {n: rms(found[n] - x) ** 2 for n, x in {"output": exact[0], **exact[2]}.items()}


@pytest.mark.parametrize("budget", [24, LARGE["budget"]])
def test_single_precision_is_as_near_as_the_reference(budget):
    settings, totals = {**LARGE, "budget": budget}, []
    for seed in range(4):  # some gradients are a few numbers, whose errors are luck
        torch.manual_seed(seed)
        arguments = inputs(300, heads=4, kv_heads=2, key_dim=64, value_dim=32)
        exact = gradients("reference", arguments, settings, [300], False)
        single = {name: t.float() for name, t in arguments.items()}
        totals.append(list(errors(single, settings, exact)))
    for name in totals[0][0]:
        ours, theirs = (sum(total[which][name] for total in totals) for which in (0, 1))
        assert ours <= 2**2 * theirs, name


def test_half_precision_is_nearer_than_the_reference():
    arguments = inputs(300, heads=4, kv_heads=2, key_dim=64, value_dim=32)
    half = {n: t.bfloat16() if n in SEQUENCES[:3] else t.float() for n, t in arguments.items()}
    exact = gradients("reference", {n: t.double() for n, t in half.items()}, LARGE, [300], False)
    ours, theirs = (gradients(b, half, LARGE, [300], False) for b in ("fused", "reference"))
    assert ours[0].dtype == torch.bfloat16
    assert rms(ours[0] - exact[0]) <= rms(theirs[0] - exact[0])
    for name, grad in exact[2].items():
        assert rms(ours[2][name] - grad) <= rms(theirs[2][name] - grad), name


def margins(before, ours, theirs, key, weights, rotary_dim):
    """By how much, in fp64, each choice of ours that differs is the worse one."""
    block = key[:, :, theirs.start : theirs.start + theirs.route.shape[-1]]
    stored = weights.norm(position_free(block, rotary_dim))
    rows = torch.cat([before.rows.key, gather(stored, theirs.appended)], dim=2)
    novelty = (stored @ weights.norm(before.rows.key).mT).amax(dim=-1)
    worst = [novelty.gather(-1, x.appended).sort(dim=-1).values for x in (ours, theirs)]
    yield from (worst[0] - worst[1])[ours.appended != theirs.appended]
    if torch.equal(ours.appended, theirs.appended):
        similarity = stored @ weights.norm(rows).mT
        picked = [similarity.gather(-1, x.route.clamp_min(0)[..., None]) for x in (ours, theirs)]
        yield from (picked[1] - picked[0])[..., 0][ours.route != theirs.route]


@pytest.mark.parametrize("rotary_dim", [0, 32])
def test_choices_differ_only_within_the_rounding_noise(rotary_dim):
    """Keys with many near ties: until the memories differ, only noise decides otherwise in fp32."""
    found = []
    for seed in range(6):
        torch.manual_seed(seed)
        arguments = inputs(400, key_dim=64)
        kinds = torch.randn(1, 1, 40, 64, dtype=torch.float64)[:, :, torch.randint(40, (400,))]
        arguments["key"] = kinds + 1e-6 * torch.randn_like(kinds)
        names = ("norm_weight", "norm_bias", "state_temperature", "window_temperature")
        weights = KVMWeights(*(arguments[name] for name in names))
        settings = {**LARGE, "rotary_dim": rotary_dim}
        exact = run("reference", arguments, settings, [400])[2]
        ours = run("fused", {n: t.float() for n, t in arguments.items()}, settings, [400])[2]
        for before, our, their in zip(exact, ours[1:], exact[1:], strict=False):
            these = list(margins(before, our, their, arguments["key"], weights, rotary_dim))
            found += these
            if these:
                break
    assert found and max(found) <= 1e-4


# ----------------------------------------------------------------------------- what it leaves be


def test_only_what_needs_a_gradient_gets_one():
    arguments = inputs(40, heads=4, kv_heads=2, key_dim=12)
    settings = {"rotary_dim": 6, "chunk_size": 4, "budget": lambda seen: 2 * seen**0.5}
    expected = gradients("fused", arguments, settings, [40], weigh_memory=False)[2]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 4, 40, 4, generator=generator, dtype=torch.float64)
    for name in arguments:
        given = {n: t.detach().clone().requires_grad_(n == name) for n, t in arguments.items()}
        output = kvm_attention(**given, **settings, backend="fused")
        (grad,) = torch.autograd.grad((output * weight).sum(), [given[name]])
        assert torch.equal(grad, expected[name]), name


def test_backward_twice_but_not_of_the_gradient():
    given = {n: t.requires_grad_() for n, t in inputs(30, key_dim=12).items()}
    output = kvm_attention(**given, rotary_dim=6, chunk_size=4, budget=6, backend="fused")
    first, again = (
        torch.autograd.grad(output.sum(), list(given.values()), retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, again))
    (grad,) = torch.autograd.grad(output.square().sum(), [given["query"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_that_was_given_changes_and_nothing_is_shared(grad):
    arguments = inputs(40, key_dim=12)
    settings = {"rotary_dim": 6, "chunk_size": 4, "budget": lambda seen: 2 * seen**0.5}
    first = {n: t[:, :, :22] if n in SEQUENCES else t for n, t in arguments.items()}
    _, memory = kvm_attention(**first, **settings, return_memory=True)
    old = memory.map(torch.clone)
    second = {n: t[:, :, 22:] if n in SEQUENCES else t for n, t in arguments.items()}
    second = {n: t.clone().requires_grad_(grad) for n, t in second.items()}
    kept = {n: t.detach().clone() for n, t in second.items()}
    with torch.set_grad_enabled(grad):
        output, new = kvm_attention(**second, **settings, memory=memory, return_memory=True)
    if grad:
        (output.sum() + new.rows.key.sum()).backward()
    assert all(torch.equal(kept[n], second[n]) for n in kept)
    assert all(map(torch.equal, memory.tensors(), old.tensors()))
    given = {t.untyped_storage().data_ptr() for t in [*second.values(), *memory.tensors()]}
    for tensor in new.tensors():
        storage = tensor.untyped_storage()
        assert storage.nbytes() == tensor.numel() * tensor.element_size()
        assert storage.data_ptr() not in given


def test_it_reads_no_memory_that_it_did_not_write():
    arguments = inputs(50, heads=4, kv_heads=2, key_dim=12)
    settings = {"rotary_dim": 6, "chunk_size": 4, "budget": lambda seen: 2 * seen**0.5}
    clean = gradients("fused", arguments, settings, [21, 29])
    torch.use_deterministic_algorithms(True)  # fills what is uninitialised with NaN
    try:
        assert torch.empty(3).isnan().all()
        poisoned = gradients("fused", arguments, settings, [21, 29])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(clean[0], poisoned[0])
    assert all(map(torch.equal, clean[1].tensors(), poisoned[1].tensors()))
    assert all(map(torch.equal, clean[2].values(), poisoned[2].values()))


def test_checkpointing_and_inference():
    arguments = inputs(40, key_dim=12)
    settings = {"rotary_dim": 6, "chunk_size": 4, "budget": 9, "backend": "fused"}

    def function(*tensors):
        return kvm_attention(**dict(zip(arguments, tensors, strict=True)), **settings)

    tensors = [t.requires_grad_() for t in arguments.values()]
    plain = torch.autograd.grad(function(*tensors).sum(), tensors)
    again = checkpoint(function, *tensors, use_reentrant=False).sum()
    assert all(map(torch.equal, plain, torch.autograd.grad(again, tensors)))
    with torch.inference_mode():
        output = function(*tensors)
    assert torch.equal(output, function(*tensors))


# --------------------------------------------------------------------------------------- counts


def count_flops(backend, arguments, settings):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        kvm_attention(**arguments, **settings, backend=backend)
    return counter.get_total_flops()


def test_compressed_keys_take_fewer_flops():
    arguments = inputs(1024, key_dim=64, value_dim=64, dtype=torch.float32)
    settings = {"rotary_dim": 32, "chunk_size": 16, "budget": 256}
    ours, theirs = (count_flops(b, arguments, settings) for b in ("fused", "reference"))
    assert ours < 0.85 * theirs
    kept = {**settings, "stored_rotary": "kept"}  # nothing to compress
    assert count_flops("fused", arguments, kept) == count_flops("reference", arguments, kept)


def test_what_is_kept_for_the_way_back():
    """Inputs, the last memory, and of each update the rows that it replaced: no probabilities."""
    length, chunk, heads, width = 512, 16, 2, 32 + 2 + 64 + 1
    given = inputs(length, heads=heads, kv_heads=heads, key_dim=64, value_dim=64)
    given = {n: t.float().requires_grad_() for n, t in given.items()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kvm_attention(**given, rotary_dim=32, chunk_size=chunk, budget=64, backend="fused")
    operands = sum(t.numel() for t in given.values())
    updates = length // chunk - 2
    expected = operands + heads * width * (64 + updates * chunk) + 2 * heads * updates * chunk
    appended = 2 * heads * 64
    assert sum(kept.values()) <= 4 * (expected + appended)


@pytest.mark.parametrize(
    ("length", "learns", "wanted"),
    [(64, True, "reference"), (64, False, "fused"), (900, True, "fused")],
)
def test_auto_leaves_short_calls_with_gradients_to_autograd(length, learns, wanted, monkeypatch):
    """By the number of scores: 2 heads, all tokens, all rows and the window."""
    monkeypatch.setattr(api, "AUTOGRAD_SCORES", 2 * 500 * (64 + 32))
    called = []
    for name, backend in api.BACKENDS.items():
        monkeypatch.setitem(
            api.BACKENDS, name, lambda *a, n=name, b=backend: called.append(n) or b(*a)
        )
    data = torch.randn(3, 1, 2, length, 8)
    query, key, value = data.requires_grad_(learns)
    one = torch.ones(8)
    settings = {"norm_weight": one, "norm_bias": 0 * one, "rotary_dim": 4, "chunk_size": 16}
    api.kvm_attention(query, key, value, budget=64, **settings)
    with torch.no_grad():
        api.kvm_attention(query, key, value, budget=64, **settings)
    assert called == [wanted, "fused"]
