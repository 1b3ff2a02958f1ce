"""The OVQ operator on its own: a loop as an oracle, gradients, splits, ties, wrong input."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from meanbank.ops.kvm.routing import ascending
from meanbank.ops.ovq import ovq_attention

SEQUENCE = ("query", "key", "value")


def inputs(length, *, batch=1, heads=2, kv_heads=1, key_dim=6, value_dim=4, dtype=torch.float64):
    return {
        "query": torch.randn(batch, heads, length, key_dim, dtype=dtype),
        "key": torch.randn(batch, kv_heads, length, key_dim, dtype=dtype),
        "value": torch.randn(batch, kv_heads, length, value_dim, dtype=dtype),
        "temperature": 1 + 0.2 * torch.randn(heads, dtype=dtype),
    }


def plateau(rows):
    return lambda seen: seen * rows // (seen + rows)


SETTINGS = {"chunk_size": 4, "budget": plateau(10)}


def part_of(arguments, start, stop):
    return {n: t[:, :, start:stop] if n in SEQUENCE else t for n, t in arguments.items()}


def run_head(query, key, value, temperature, chunk_size, budget):
    """One head of one sequence, token by token; rows are [key sum, value sum, count]."""
    query = query / (query.norm(dim=-1, keepdim=True) + 1e-5)
    key = key / (key.norm(dim=-1, keepdim=True) + 1e-5)
    rows, outputs = [], []
    for token in range(len(query)):
        if token and token % chunk_size == 0:
            swallow(rows, key, value, range(token - chunk_size, token), budget(token))
        local = range(token // chunk_size * chunk_size, token + 1)
        seen = [(k / n, v / n, n) for k, v, n in rows] + [(key[i], value[i], 1) for i in local]
        logits = torch.stack([temperature * (query[token] @ k) for k, _, _ in seen])
        logits = (
            logits * math.sqrt(len(key[0]))
            + torch.tensor([float(n) for *_, n in seen], dtype=query.dtype).log()
        )
        outputs.append(logits.softmax(0) @ torch.stack([v for _, v, _ in seen]))
    return torch.stack(outputs), rows


def swallow(rows, key, value, chunk, wanted):
    chunk = list(chunk)
    if not rows:
        first = chunk.pop(0)
        rows.append([key[first], value[first], 1])
    similarity = {  # rounded, so that equal ones are equal
        i: [round((key[i] @ k).item() / n, 9) for k, _, n in rows] for i in chunk
    }
    by_novelty = sorted(chunk, key=lambda i: max(similarity[i]))
    opened = by_novelty[: max(0, wanted - len(rows))]
    for i in chunk:
        if i not in opened:
            row = rows[similarity[i].index(max(similarity[i]))]
            row[:] = [row[0] + key[i], row[1] + value[i], row[2] + 1]
    rows.extend([key[i], value[i], 1] for i in opened)


def oracle(query, key, value, temperature, *, chunk_size, budget):
    """Outputs (B, H, T, Dv), and the means and counts of the dictionary."""
    groups = query.shape[1] // key.shape[1]
    outputs, means = [], []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            output, rows = run_head(
                query[b, h],
                key[b, h // groups],
                value[b, h // groups],
                temperature[h],
                chunk_size,
                budget,
            )
            outputs.append(output)
            if h % groups == 0:
                means.append([(k / n, v / n, torch.tensor(float(n))) for k, v, n in rows])
    shape = (*query.shape[:3], value.shape[-1])
    stacked = [[torch.stack(parts) for parts in zip(*rows, strict=True)] for rows in means]
    return torch.stack(outputs).view(shape), [torch.stack(x) for x in zip(*stacked, strict=True)]


@given(st.integers(1, 26), st.integers(1, 6), st.sampled_from([1, 3, 12, 100]), st.booleans())
def test_it_equals_the_loop(length, chunk_size, limit, grouped):
    arguments = inputs(length, batch=2, heads=4, kv_heads=2 if grouped else 4)
    settings = {"chunk_size": chunk_size, "budget": plateau(limit)}
    output, memory = ovq_attention(**arguments, **settings, return_memory=True)
    expected, rows = oracle(**arguments, **settings)
    assert (output - expected).abs().max() <= 1e-12
    assert (memory.rows is None) == (length <= chunk_size)
    if memory.rows is not None:
        for ours, theirs in zip(memory.rows.tensors(), rows, strict=True):
            assert (ours.flatten(0, 1) - theirs).abs().max() <= 1e-12


def test_gradients_equal_those_of_the_loop():
    arguments = inputs(23, batch=2, heads=4, kv_heads=2)
    tensors = [t.requires_grad_() for t in arguments.values()]
    output = ovq_attention(**arguments, **SETTINGS)
    expected, _ = oracle(**arguments, **SETTINGS)
    direction = torch.randn_like(output)
    ours = torch.autograd.grad(output, tensors, direction)
    theirs = torch.autograd.grad(expected, tensors, direction)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-11


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_gradients(length):
    arguments = inputs(length)
    tensors = [t.requires_grad_() for t in arguments.values()]
    assert gradcheck(lambda *t: ovq_attention(*t, **SETTINGS), tensors, eps=1e-6, atol=1e-6)


def test_gradients_through_a_carried_memory():
    arguments = inputs(11)

    def run(*tensors):
        given = dict(zip(arguments, tensors, strict=True))
        _, memory = ovq_attention(**part_of(given, 0, 6), **SETTINGS, return_memory=True)
        output, memory = ovq_attention(
            **part_of(given, 6, 11), **SETTINGS, memory=memory, return_memory=True
        )
        return output, memory.rows.key, memory.rows.value, memory.window_key

    assert gradcheck(run, [t.requires_grad_() for t in arguments.values()], eps=1e-6, atol=1e-6)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([plateau(1), plateau(12), lambda seen: 1.5 * seen**0.6, lambda seen: seen]),
)
def test_any_split(splits, chunk_size, budget):
    arguments = inputs(sum(splits), batch=2, heads=4, kv_heads=2)
    settings = {"chunk_size": chunk_size, "budget": budget, "return_memory": True}
    whole, expected = ovq_attention(**arguments, **settings)
    memory, outputs, start = None, [], 0
    for length in splits:
        part = part_of(arguments, start, start + length)
        output, memory = ovq_attention(**part, **settings, memory=memory)
        outputs.append(output)
        start += length
    assert (torch.cat(outputs, dim=2) - whole).abs().max() <= 1e-12
    assert memory.seen == expected.seen
    for ours, theirs in zip(memory.tensors(), expected.tensors(), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("budget", [plateau(1), plateau(9), lambda seen: seen])
def test_no_token_is_seen_twice_or_lost(budget):
    """With queries of zero a row weighs as much as its tokens: outputs are running means."""
    arguments = inputs(22)
    arguments["query"] = torch.zeros_like(arguments["query"])
    output = ovq_attention(**arguments, chunk_size=4, budget=budget)
    counts = torch.arange(1, 23, dtype=torch.float64)[:, None]
    assert (output - arguments["value"].cumsum(dim=2) / counts).abs().max() <= 1e-12


def test_updates_worked_out_by_hand():
    """Chunk 4, three rows, then four: which token goes where, and in which order."""
    angles = torch.tensor([0.0, 60, 90, 10, 95, 180, 15, 70, 0], dtype=torch.float64).deg2rad()
    key = torch.stack([angles.cos(), angles.sin()], dim=-1)[None, None]
    value = torch.arange(1.0, 10.0, dtype=torch.float64).view(1, 1, 9, 1)
    wanted = {4: 3, 8: 4}
    ones = torch.ones(1, dtype=torch.float64)
    rows = [
        ovq_attention(
            *(x[:, :, :length] for x in (key, key, value)),
            ones,
            chunk_size=4,
            budget=wanted.__getitem__,
            return_memory=True,
        )[1].rows
        for length in (4, 5, 8, 9)
    ]
    assert rows[0] is None  # the first chunk is taken in when token 4 arrives
    # 90 degrees, then 60 are least like 0 and open rows; 10 degrees joins token 0.
    assert rows[1].value.flatten().tolist() == [2.5, 3.0, 2.0]
    assert rows[1].count.flatten().tolist() == [2.0, 1.0, 1.0]
    assert torch.equal(rows[2].value, rows[1].value)
    # 180 degrees opens a row; 95 joins 90, 15 joins [0, 10] and 70 joins 60.
    assert rows[3].value.flatten().tolist() == [4.0, 4.0, 5.0, 6.0]
    assert rows[3].count.flatten().tolist() == [3.0, 2.0, 2.0, 1.0]
    assert (rows[3].key[0, 0, 0] - key[0, 0, [0, 3, 6]].mean(dim=0)).abs().max() <= 2e-5


def test_a_chunk_is_taken_in_when_the_next_token_arrives():
    arguments = inputs(9)
    _, memory = ovq_attention(**part_of(arguments, 0, 8), **SETTINGS, return_memory=True)
    assert memory.rows.count.sum() == 4
    assert memory.window_length == 4
    _, memory = ovq_attention(
        **part_of(arguments, 8, 9), **SETTINGS, memory=memory, return_memory=True
    )
    assert memory.rows.count.sum() == 8
    assert memory.window_length == 1


def test_a_memory_holds_no_more_than_it_says():
    _, memory = ovq_attention(**inputs(4 * 25 + 1), **SETTINGS, return_memory=True)
    for tensor in memory.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_values_may_be_put_back_between_calls():
    arguments = inputs(10)
    whole = ovq_attention(**arguments, **SETTINGS)
    _, memory = ovq_attention(**part_of(arguments, 0, 7), **SETTINGS, return_memory=True)
    bare = dataclasses.replace(memory, window_value=None)
    memory = dataclasses.replace(bare, window_value=arguments["value"][:, :, 4:7])
    output = ovq_attention(**part_of(arguments, 7, 10), **SETTINGS, memory=memory)
    assert (output - whole[:, :, 7:]).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [lambda seen: 3, lambda seen: seen // 3])
@pytest.mark.parametrize(("key_dim", "chunk_size"), [(16, 3), (32, 5), (64, 16)])
def test_copies_of_a_token_are_ties(dtype, budget, key_dim, chunk_size):
    """Four kinds of tokens: products round copies differently, which must not decide anything."""
    length = 6 * chunk_size + 1
    arguments = inputs(length, batch=2, kv_heads=2, key_dim=key_dim)
    kinds = torch.randint(4, (length,))
    kinds[: chunk_size // 2] = 0
    # norms about the 1e-5 in the divisor: lengths of normalised keys then differ between kinds
    key = F.normalize(arguments["key"][:, :, :4], dim=-1) * torch.tensor([1, 2, 3, 5])[:, None]
    arguments["key"] = (1e-5 * key)[:, :, kinds].to(dtype).double()
    given = {name: tensor.to(dtype) for name, tensor in arguments.items()}
    settings = {"chunk_size": chunk_size, "budget": budget}
    _, memory = ovq_attention(**given, **settings, return_memory=True)
    _, (_, value, count) = oracle(**arguments, **settings)
    assert torch.equal(memory.rows.count.flatten(0, 1).float(), count)
    assert (memory.rows.value.flatten(0, 1) - value).abs().max() <= 1e-5  # who went where


def test_equal_tokens_open_and_join_the_first():
    arguments = inputs(9)
    arguments["key"] = arguments["key"][:, :, :1].expand(-1, -1, 9, -1)
    value = torch.arange(9.0, dtype=torch.float64)
    arguments["value"] = value.view(1, 1, 9, 1)
    _, memory = ovq_attention(
        **arguments, chunk_size=4, budget={4: 3, 8: 4}.__getitem__, return_memory=True
    )
    members = [[0, 3, 5, 6, 7], [1], [2], [4]]
    means = [sum(row) / len(row) for row in members]
    assert memory.rows.value.flatten().tolist() == pytest.approx(means)
    assert memory.rows.count.flatten().tolist() == [len(row) for row in members]


@given(st.lists(st.integers(0, 3), max_size=70))
def test_ascending(values):
    expected = sorted(range(len(values)), key=lambda i: (values[i], i))
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, -1)
    shaken = x + 1e-3 * torch.rand_like(x)  # noise must not decide
    assert ascending(shaken, torch.full((1, 1, 1), 0.01)).flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_means_and_counts_in_fp32(dtype):
    arguments = inputs(60, heads=4, kv_heads=2, dtype=torch.float32)
    half = {name: tensor.to(dtype) for name, tensor in arguments.items()}
    output, memory = ovq_attention(**half, **SETTINGS, return_memory=True)
    assert output.dtype == memory.window_key.dtype == memory.window_value.dtype == dtype
    assert {tensor.dtype for tensor in memory.rows.tensors()} == {torch.float32}
    assert (memory.rows.count.sum(dim=-1) == 56).all()
    before = ovq_attention(**part_of(arguments, 0, 4), **SETTINGS)
    assert (output[:, :, :4] - before).abs().max() <= 0.1


def test_autocast_does_not_reach_the_routing():
    arguments = inputs(40, heads=4, kv_heads=2, dtype=torch.float32)
    _, plain = ovq_attention(**arguments, **SETTINGS, return_memory=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, mixed = ovq_attention(**arguments, **SETTINGS, return_memory=True)
    for ours, theirs in zip(mixed.tensors(), plain.tensors(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
def test_tiny_and_huge_activations_stay_finite(scale):
    arguments = inputs(30, dtype=torch.float32)
    arguments = {n: (t * scale if n in SEQUENCE else t) for n, t in arguments.items()}
    tensors = [t.requires_grad_() for t in arguments.values()]
    output = ovq_attention(*tensors, **SETTINGS)
    output.sum().backward()
    assert all(torch.isfinite(x).all() for x in (output, *(t.grad for t in tensors)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.zeros(1, 1, 4, 4)}, "key and value must agree"),
        ({"query": torch.zeros(1, 2, 4, 6)}, "query and key must agree"),
        ({"query": torch.zeros(1, 3, 5, 6), "kv": 2}, "must be a multiple"),
        ({"query": torch.zeros(1, 2, 5, 6, dtype=torch.long)}, "floating-point"),
        ({"key": torch.zeros(5, 6)}, "floating-point tensor"),
        ({"temperature": torch.zeros(3)}, "temperature must have one entry"),
        ({"chunk_size": 0}, "chunk_size must be positive, got 0"),
        ({"budget": 12}, "budget must be a function"),
        ({"budget": lambda seen: math.inf, "chunk_size": 2}, "got inf after 2 tokens"),
        ({"budget": lambda seen: math.nan, "chunk_size": 2}, "got nan after 2 tokens"),
    ],
)
def test_wrong_input_is_one_clear_line(change, message):
    change = dict(change)
    arguments = inputs(5, kv_heads=change.pop("kv", 1), dtype=torch.float32)
    with pytest.raises(ValueError, match=message) as error:
        ovq_attention(**{**arguments, **SETTINGS, **change})
    assert "\n" not in str(error.value)


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        ovq_attention(**inputs(0), **SETTINGS)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 5},
        {"chunk_size": 8},
        {"memory": {"seen": 8}},
        {"memory": {"seen": 2}},
        {"memory": {"rows": None}},
        {"memory": {"window_value": None}},
        {"memory": {"window_value": torch.zeros(1, 1, 2, 3)}},
        {"inputs": {"batch": 3}},
        {"inputs": {"value_dim": 5}},
        {"inputs": {"key_dim": 8}},
    ],
)
def test_a_memory_that_contradicts_the_call_is_refused(change):
    change = dict(change)
    _, memory = ovq_attention(**inputs(14), **SETTINGS, return_memory=True)
    memory = dataclasses.replace(memory, **change.pop("memory", {}))
    arguments = inputs(5, **change.pop("inputs", {}))
    with pytest.raises(ValueError, match="memory"):
        ovq_attention(**arguments, **{**SETTINGS, **change}, memory=memory)


@pytest.mark.parametrize("first", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", [torch.float64, torch.float32, torch.bfloat16])
def test_a_memory_goes_on_in_another_precision(first, second):
    arguments = inputs(20)
    halves = [
        {n: t.to(dtype) for n, t in part_of(arguments, start, stop).items()}
        for dtype, start, stop in ((first, 0, 13), (second, 13, 20))
    ]
    _, memory = ovq_attention(**halves[0], **SETTINGS, return_memory=True)
    output = ovq_attention(**halves[1], **SETTINGS, memory=memory)
    assert output.dtype == second
    assert torch.isfinite(output).all()
