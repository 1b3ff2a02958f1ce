"""The KVM operator on its own: worked examples, gradients, ties, precision and wrong input."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from meanbank.core.geometry import Geometry
from meanbank.memory import KVM
from meanbank.ops import KVMRows, kvm_attention
from meanbank.ops.kvm.api import BACKENDS
from meanbank.ops.kvm.common import KVMWeights, readout
from meanbank.ops.kvm.options import KVMOptions
from meanbank.ops.kvm.routing import first_argmax, lowest


def inputs(length, *, batch=1, heads=2, kv_heads=1, key_dim=6, value_dim=4, dtype=torch.float64):
    return {
        "query": torch.randn(batch, heads, length, key_dim, dtype=dtype),
        "key": torch.randn(batch, kv_heads, length, key_dim, dtype=dtype),
        "value": torch.randn(batch, kv_heads, length, value_dim, dtype=dtype),
        "merge_gate": torch.rand(batch, kv_heads, length, dtype=dtype) + 0.5,
        "norm_weight": 1 + 0.2 * torch.randn(key_dim, dtype=dtype),
        "norm_bias": 0.2 * torch.randn(key_dim, dtype=dtype),
        "state_temperature": 1 + 0.2 * torch.randn(heads, dtype=dtype),
        "window_temperature": 1 + 0.2 * torch.randn(heads, dtype=dtype),
    }


SETTINGS = {"rotary_dim": 2, "chunk_size": 3, "budget": lambda seen: int(2 * seen**0.5)}
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def dense_attention(query, key, value, window_temperature, **_):
    """Causal attention written as differently as possible."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1) * window_temperature[:, None, None]
    value = value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) / math.sqrt(query.shape[-1])
    length = query.shape[2]
    scores = scores + torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), value)


@each_backend
def test_before_any_overflow_it_is_causal_attention(backend):
    arguments = inputs(6, heads=4, kv_heads=2)  # exactly the two chunks of the window
    output = kvm_attention(backend=backend, **arguments, **SETTINGS)
    assert (output - dense_attention(**arguments)).abs().max() <= 1e-12


@each_backend
def test_no_token_is_seen_twice_or_lost(backend):
    """With room for every token and equal keys everywhere, outputs are plain running means."""
    length, settings = 14, {**SETTINGS, "budget": lambda seen: seen, "rotary_dim": 0}
    arguments = inputs(length)
    arguments["query"] = torch.zeros_like(arguments["query"])  # every visible key weighs the same
    output = kvm_attention(backend=backend, **arguments, **settings)
    counts = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    mean = arguments["value"].cumsum(dim=2) / counts
    assert (output - mean).abs().max() <= 1e-12


def test_the_radius_restores_scale_not_vectors():
    """The teaching example: (1, 0) and (0, 1) merge to length sqrt 2; the readout has length 1."""
    options = KVMOptions(rotary_dim=0, budget=lambda seen: 1)
    rows = KVMRows(torch.zeros(1, 1, 1, 4), torch.tensor([[[[1.0, 1.0]]]]), torch.ones(1, 1, 1))
    assert torch.allclose(
        readout(rows.value, rows.scale, options), torch.full((1, 1, 1, 2), 0.5**0.5)
    )
    mean = KVMOptions(rotary_dim=0, budget=lambda seen: 1, value_scale="count")
    rows = KVMRows(rows.key, rows.value, torch.full((1, 1, 1), 2.0))
    assert torch.allclose(readout(rows.value, rows.scale, mean), torch.full((1, 1, 1, 2), 0.5))


@each_backend
def test_an_update_worked_out_by_hand(backend):
    """Chunk 2, window 1, no sink protection needed: one token appended, one merged."""
    key = torch.zeros(1, 1, 5, 4, dtype=torch.float64)
    directions = torch.tensor(
        [[1.0, -1, 0, 0], [0, 0, 1, -1], [1, -1, 0.1, -0.1], [-1, 1, 0, 0], [0.0, 0, 0, 0]]
    )
    key[0, 0] = directions
    value = torch.arange(1.0, 6.0, dtype=torch.float64).view(1, 1, 5, 1)
    trace: list = []
    kvm_attention(
        key,
        key,
        value,
        torch.full((1, 1, 5), 0.5, dtype=torch.float64),
        norm_weight=torch.ones(4, dtype=torch.float64),
        norm_bias=torch.zeros(4, dtype=torch.float64),
        rotary_dim=0,
        chunk_size=2,
        window_chunks=1,
        sink=0,
        budget=3,
        trace=trace,
        backend=backend,
    )
    first, second = trace
    assert first.rows.count == 2  # tokens 0 and 1, as they are
    assert first.rows.value.flatten().tolist() == [1.0, 2.0]
    assert second.appended.tolist() == [[[1]]]  # token 3 points away from everything
    assert second.route.tolist() == [[[0, -1]]]  # token 2 is like token 0
    assert second.rows.value.flatten().tolist() == [1.0 + 0.5 * 3.0, 2.0, 4.0]
    assert second.rows.scale.flatten().tolist() == [1.0, 2.0, 4.0]


@each_backend
def test_the_sink_is_never_written(backend):
    trace: list = []
    arguments = inputs(40, batch=2, heads=4, kv_heads=2)
    kvm_attention(backend=backend, **arguments, **SETTINGS, sink=2, trace=trace)
    assert len(trace) == 12
    for update in trace[1:]:
        assert ((update.route == -1) | (update.route >= 2)).all()
        assert torch.equal(update.rows.key[:, :, :2], trace[0].rows.key[:, :, :2])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 14])
@pytest.mark.parametrize("value_scale", ["radius", "count", "chunk_count"])
def test_gradients(length, value_scale):
    arguments = inputs(length)
    names = list(arguments)

    def run(*tensors):
        return kvm_attention(
            **dict(zip(names, tensors, strict=True)),
            **SETTINGS,
            value_scale=value_scale,
            gated_writes=("initial", "append", "merge"),
        )

    tensors = [t.requires_grad_() for t in arguments.values()]
    assert gradcheck(run, tensors, eps=1e-6, atol=1e-6)


@each_backend
def test_gradients_through_a_carried_memory(backend):
    arguments = inputs(11)
    names = list(arguments)

    def run(*tensors):
        given = dict(zip(names, tensors, strict=True))
        sequence = ("query", "key", "value", "merge_gate")
        first = {n: (t[:, :, :8] if n in sequence else t) for n, t in given.items()}
        second = {n: (t[:, :, 8:] if n in sequence else t) for n, t in given.items()}
        _, memory = kvm_attention(backend=backend, **first, **SETTINGS, return_memory=True)
        output, memory = kvm_attention(
            backend=backend, **second, **SETTINGS, memory=memory, return_memory=True
        )
        return output, memory.rows.key, memory.rows.value, memory.rows.scale

    assert gradcheck(run, [t.requires_grad_() for t in arguments.values()], eps=1e-6, atol=1e-6)


@each_backend
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from([2, 5, 12, lambda seen: int(1.5 * seen**0.6)]),
)
def test_any_split_any_shape(backend, splits, chunk_size, window_chunks, sink, budget):
    arguments = inputs(sum(splits), batch=2, heads=4, kv_heads=2)
    settings = {
        "rotary_dim": 2,
        "chunk_size": chunk_size,
        "window_chunks": window_chunks,
        "sink": sink,
        "budget": budget,
        "return_memory": True,
    }
    whole, expected = kvm_attention(backend=backend, **arguments, **settings)
    memory, outputs, start = None, [], 0
    for length in splits:
        part = {
            name: tensor[:, :, start : start + length]
            if name in ("query", "key", "value", "merge_gate")
            else tensor
            for name, tensor in arguments.items()
        }
        output, memory = kvm_attention(backend=backend, **part, **settings, memory=memory)
        outputs.append(output)
        start += length
    assert (torch.cat(outputs, dim=2) - whole).abs().max() <= 1e-10
    for ours, theirs in zip(memory.tensors(), expected.tensors(), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-10


@each_backend
def test_equal_tokens_break_ties_to_the_lowest_index(backend):
    arguments = inputs(30)
    for name in ("query", "key", "value", "merge_gate"):
        arguments[name] = arguments[name][:, :, :1].expand_as(arguments[name]).clone()
    trace: list = []
    output = kvm_attention(
        backend=backend, **arguments, **{**SETTINGS, "rotary_dim": 0}, trace=trace
    )
    assert torch.isfinite(output).all()
    for update in trace[1:]:
        count = update.appended.shape[-1]
        assert update.appended.flatten().tolist() == list(range(count))
        assert set(update.route[update.route >= 0].tolist()) <= {1}  # the first row after the sink


@given(st.lists(st.integers(0, 3), min_size=1, max_size=70))
def test_first_argmax(values):
    expected = values.index(max(values))
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, 1, -1)
    assert first_argmax(x, torch.full((1, 1, 1), 0.5)).item() == expected


@given(size=st.integers(1, 200), broken=st.sets(st.integers(0, 199)), block=st.integers(1, 70))
def test_first_argmax_of_nan_stays_within_the_rows(size, broken, block):
    """A model that has gone wrong is told so by its loss, not by an index out of bounds."""
    x = torch.randn(1, 1, 2, size)
    x[..., [at for at in broken if at < size]] = math.nan
    for noise in (0.1, math.nan):
        found = first_argmax(x, torch.full((1, 1, 1), noise), block)
        assert ((found >= 0) & (found < size)).all()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 40))
def test_lowest(values, count):
    count = min(count, len(values))
    expected = sorted(sorted(range(len(values)), key=lambda i: (values[i], i))[:count])
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, -1)
    shaken = x + 1e-3 * torch.rand_like(x)  # noise must not decide
    assert lowest(shaken, count, torch.full((1, 1, 1), 0.01)).flatten().tolist() == expected


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("key_dim", "chunk_size"), [(16, 3), (32, 5), (32, 32), (64, 16)])
def test_copies_of_a_token_are_ties(backend, dtype, key_dim, chunk_size):
    """Four kinds of tokens: products round copies differently, which must not decide anything."""
    length = 12 * chunk_size
    arguments = inputs(length, batch=3, heads=2, kv_heads=2, key_dim=key_dim, dtype=dtype)
    kinds = torch.randint(4, (length,))
    for name in ("query", "key", "value", "merge_gate"):
        arguments[name] = arguments[name][:, :, kinds].clone()
    trace: list = []
    settings = {"rotary_dim": key_dim // 2, "chunk_size": chunk_size, "sink": 1}
    kvm_attention(
        backend=backend, **arguments, **settings, budget=lambda seen: seen // 3, trace=trace
    )
    rows = trace[0].rows
    for update in trace[1:]:
        block = kinds[update.start : update.start + chunk_size].tolist()
        rows = torch.cat([rows.key, update.rows.key[:, :, rows.count :]], dim=2)
        for chosen in update.appended.flatten(0, 1).tolist():
            for token in chosen:  # an earlier copy was taken first
                earlier = [i for i in range(token) if block[i] == block[token]]
                assert set(earlier) <= set(chosen)
        for head_rows, routes in zip(rows.flatten(0, 1), update.route.flatten(0, 1), strict=True):
            for route in {r for r in routes.tolist() if r >= 0}:
                same = (head_rows == head_rows[route]).all(dim=-1).nonzero().flatten()
                assert route == min(i for i in same.tolist() if i >= 1)
        rows = update.rows


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_sums_and_routing_in_fp32(backend, dtype):
    arguments = inputs(60, heads=4, kv_heads=2, dtype=torch.float32)
    half = {name: tensor.to(dtype) for name, tensor in arguments.items()}
    output, memory = kvm_attention(backend=backend, **half, **SETTINGS, return_memory=True)
    assert output.dtype == dtype
    assert memory.rows.key.dtype == memory.rows.value.dtype == torch.float32
    assert memory.window_gate.dtype == torch.float32
    trace, exact = [], []
    kvm_attention(backend=backend, **half, **SETTINGS, trace=trace)
    kvm_attention(
        backend=backend, **{n: t.float() for n, t in half.items()}, **SETTINGS, trace=exact
    )
    for ours, theirs in zip(trace, exact, strict=True):
        assert torch.equal(ours.appended, theirs.appended)
        if ours.route is not None:
            assert torch.equal(ours.route, theirs.route)


@each_backend
def test_autocast_does_not_reach_the_routing(backend):
    arguments = inputs(40, heads=4, kv_heads=2, dtype=torch.float32)
    plain, mixed = [], []
    kvm_attention(backend=backend, **arguments, **SETTINGS, trace=plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kvm_attention(backend=backend, **arguments, **SETTINGS, trace=mixed)
    for ours, theirs in zip(mixed, plain, strict=True):
        assert torch.equal(ours.rows.key, theirs.rows.key)


@each_backend
def test_huge_activations_stay_finite(backend):
    arguments = inputs(50, dtype=torch.float32)
    for name in ("query", "key", "value"):
        arguments[name] *= 1e4
    assert torch.isfinite(kvm_attention(backend=backend, **arguments, **SETTINGS)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.zeros(1, 1, 4, 4)}, "key and value must agree"),
        ({"query": torch.zeros(1, 2, 4, 6)}, "query and key must agree"),
        ({"query": torch.zeros(1, 3, 5, 6), "kv": 2}, "must be a multiple"),
        ({"merge_gate": torch.zeros(1, 1, 4)}, "merge_gate must have shape"),
        ({"norm_weight": torch.zeros(5)}, "norm_weight must have shape"),
        ({"state_temperature": torch.zeros(3)}, "temperature must have one entry"),
        ({"rotary_dim": 6}, "rotary_dim must be below 6"),
        ({"sink": 3}, "sink must be"),
        ({"chunk_size": 0}, "must be positive"),
        ({"value_scale": "radii"}, "choose one of radius"),
        ({"gated_parts": ("keys",)}, "choose one of key"),
        ({"append": "novel"}, "unknown append 'novel'; choose one of novelty"),
        ({"append": "gate", "merge_gate": None}, "append gate .* merge_gate"),
        ({"read_key": "raws"}, "choose one of raw"),
        ({"stored_rotary": "zero"}, "choose one of zeroed"),
        ({"stored_rotary": None}, "unknown stored_rotary None"),
        ({"stored_rotary": "zeroed_again", "rotary_dim": 6}, "unless stored_rotary is kept"),
        ({"stored_rotary": "kept", "rotary_dim": 7}, "at most 6"),
        ({"stored_rotary": "kept", "rotary_dim": -1}, "at least 0"),
        ({"backend": "refrence"}, "choose one of reference"),
        ({"query": torch.zeros(1, 2, 5, 6, dtype=torch.long)}, "floating-point"),
    ],
)
def test_wrong_input_is_one_clear_line(change, message):
    kv_heads = change.pop("kv", 1)
    arguments = {**inputs(5, kv_heads=kv_heads, dtype=torch.float32), **SETTINGS, **change}
    with pytest.raises(ValueError, match=message) as error:
        kvm_attention(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 4},
        {"window_chunks": 1},
        {"chunk_size": 2, "window_chunks": 3},
        {"memory": {"seen": 9}},
        {"memory": {"rows": None}},
        {"memory": {"window_value": None}},
        {"batch": 3},
    ],
)
def test_a_memory_that_contradicts_the_call_is_refused(change):
    arguments = inputs(13)
    _, memory = kvm_attention(**arguments, **SETTINGS, return_memory=True)
    change = dict(change)
    memory = dataclasses.replace(memory, **change.pop("memory", {}))
    arguments = inputs(5, batch=change.pop("batch", 1))
    with pytest.raises(ValueError, match="memory"):
        kvm_attention(**arguments, **{**SETTINGS, **change}, memory=memory)


@each_backend
@pytest.mark.parametrize("first", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", [torch.float64, torch.float32, torch.bfloat16])
def test_a_memory_goes_on_in_another_precision(backend, first, second):
    arguments = inputs(20, dtype=torch.float64)
    halves = [{}, {}]
    for name, tensor in arguments.items():
        for half, dtype, part in ((0, first, slice(0, 13)), (1, second, slice(13, None))):
            in_time = name in ("query", "key", "value", "merge_gate")
            halves[half][name] = (tensor[:, :, part] if in_time else tensor).to(dtype)
    _, memory = kvm_attention(backend=backend, **halves[0], **SETTINGS, return_memory=True)
    output = kvm_attention(backend=backend, **halves[1], **SETTINGS, memory=memory)
    assert output.dtype == second
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("budget", [0, -1, 2.5, "many", None])
def test_nonsense_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="budget must be"):
        kvm_attention(**inputs(5), **{**SETTINGS, "budget": budget})


def test_a_budget_may_be_fractional():
    arguments = inputs(30)
    exact = kvm_attention(**arguments, **SETTINGS)
    settings = {**SETTINGS, "budget": lambda seen: 2 * seen**0.5}
    assert torch.equal(kvm_attention(**arguments, **settings), exact)


def test_weights_are_applied_where_they_belong():
    """LN_s is affine after zeroing: rotary channels of a stored key are its bias, not zero."""
    weights = KVMWeights(torch.full((4,), 2.0), torch.full((4,), 0.5), torch.ones(1), torch.ones(1))
    normed = weights.norm(torch.tensor([0.0, 0.0, 1.0, -1.0]))
    assert torch.allclose(normed[:2], torch.full((2,), 0.5))


GEOMETRY = Geometry(
    hidden_size=12, num_heads=4, num_kv_heads=2, key_dim=6, value_dim=4, rotary_dim=6
)


@pytest.mark.parametrize("stored_rotary", ["zeroed", "zeroed_again"])
def test_full_rotary_needs_kept_keys(stored_rotary):
    KVM(stored_rotary="kept").check(GEOMETRY)
    partial = dataclasses.replace(GEOMETRY, rotary_dim=4)
    KVM(stored_rotary=stored_rotary).check(partial)
    with pytest.raises(ValueError, match=r"rotary_fraction below 1.*stored_rotary: kept"):
        KVM(stored_rotary=stored_rotary).check(GEOMETRY)


def test_the_configuration_checks_its_controls():
    with pytest.raises(ValueError, match="merge_gate: learned, got none"):
        KVM(append="gate", merge_gate="none")
    with pytest.raises(ValueError, match="choose one of novelty"):
        KVM(append="novel")  # pyright: ignore[reportArgumentType]
    settings = KVM(append="recent", read_key="raw", stored_rotary="kept").operator_settings()
    assert {"append", "read_key", "stored_rotary"} <= settings.keys()
