"""Token by token: the same numbers, nothing copied, nothing stale, and states stay values."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from meanbank.core.room import appended, spare_nbytes
from meanbank.ops import kvm_attention
from tests.ops.test_kvm import inputs

CHUNK = 4
SEQUENCES = ("query", "key", "value", "merge_gate")
SETTINGS = {"rotary_dim": 6, "chunk_size": CHUNK, "budget": lambda seen: 2 * seen**0.5}


def token(arguments, at, rows=slice(None)):
    return {n: t[rows, :, at : at + 1] if n in SEQUENCES else t for n, t in arguments.items()}


def follow(arguments, at, memory, rows=slice(None), backend="fused", **settings):
    """One more token through the operator."""
    return kvm_attention(
        **token(arguments, at, rows),
        **{**SETTINGS, **settings},
        memory=memory,
        return_memory=True,
        backend=backend,
    )


def follow_all(arguments, start, stop, memory=None, **settings):
    outputs = []
    for at in range(start, stop):
        output, memory = follow(arguments, at, memory, **settings)
        outputs.append(output)
    return torch.cat(outputs, dim=2), memory


def assert_close(found, wanted, tolerance):
    assert (found.double() - wanted.double()).abs().max() <= tolerance


VARIANTS = [
    {},
    {"read_key": "raw", "stored_rotary": "zeroed_again"},
    {"value_scale": "count", "stored_rotary": "kept"},
    {"value_scale": "chunk_count", "budget": CHUNK, "window_chunks": 1},
    {"chunk_size": 1, "sink": 0, "window_chunks": 3},
]


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 1, 1), (1, 4, 4), (8, 4, 2)])
def test_equal_to_the_reference_over_many_overflows(variant, batch, heads, kv_heads):
    arguments = inputs(30, batch=batch, heads=heads, kv_heads=kv_heads, key_dim=12)
    settings = {**SETTINGS, **variant}
    wanted, theirs = kvm_attention(**arguments, **settings, return_memory=True, backend="reference")
    found, ours = follow_all(arguments, 0, 30, **variant)
    assert_close(found, wanted, 1e-10)
    for tensor, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert_close(tensor, other, 1e-10)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)],
)
def test_every_dtype(dtype, tolerance):
    arguments = inputs(60, batch=2, heads=4, kv_heads=2, key_dim=12)
    half = {n: t if n == "merge_gate" else t.to(dtype) for n, t in arguments.items()}
    wanted = kvm_attention(**half, **SETTINGS, backend="reference")
    found, memory = follow_all(half, 0, 60)
    assert found.dtype == memory.window_key.dtype == dtype
    assert_close(found, wanted, tolerance)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (1, 2, 3, 0)])
@pytest.mark.parametrize("widths", [(6, 1), (7, 5)])
@pytest.mark.parametrize("batch", [1, 3])
def test_any_strides_and_widths(batch, widths, order, dtype):
    """Inputs may stand in memory in any order, and channels may be one alone."""
    key_dim, value_dim = widths
    arguments = inputs(22, batch=batch, heads=4, kv_heads=2, key_dim=key_dim, value_dim=value_dim)
    arguments = {n: t if n == "merge_gate" else t.to(dtype) for n, t in arguments.items()}
    settings = {"rotary_dim": 2, "chunk_size": 3}
    back = [order.index(dim) for dim in range(4)]

    def laid_out(arguments):
        return {
            name: tensor.permute(order).contiguous().permute(back) if tensor.ndim == 4 else tensor
            for name, tensor in arguments.items()
        }

    wanted = kvm_attention(**arguments, **{**SETTINGS, **settings}, backend="reference")
    memory = None
    for at in range(22):
        output, memory = kvm_attention(
            **laid_out(token(arguments, at)),
            **{**SETTINGS, **settings},
            memory=memory,
            return_memory=True,
            backend="fused",
        )
        tolerance = 1e-10 if dtype == torch.float64 else 5e-2
        assert_close(output, wanted[:, :, at : at + 1], tolerance)


@st.composite
def turns(draw):
    """Which of the memories at hand is changed, and how."""
    kinds = st.sampled_from(["token", "token", "token", "token", "both", "rows", "clone", "copy"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 99)), min_size=4, max_size=24))


@torch.no_grad()
@hypothesis_settings(max_examples=25)
@given(turns=turns())
def test_continuations_do_not_meet(turns):
    """Whatever becomes of its neighbours, a memory gives what its tokens give alone."""
    arguments, half = inputs(50, batch=2, key_dim=12), 25  # other tokens from there on
    _, memory = follow_all(arguments, 0, 9)
    held = [(memory, [*range(9)], [0, 1])]

    def go_on(which, shift):
        memory, seen, rows = held[which]
        at = len(seen) + shift
        output, memory = follow(arguments, at, memory, rows)
        alone = {
            n: t[rows][:, :, [*seen, at]] if n in SEQUENCES else t for n, t in arguments.items()
        }
        wanted, theirs = kvm_attention(**alone, **SETTINGS, return_memory=True, backend="reference")
        assert_close(output, wanted[:, :, -1:], 1e-10)
        for tensor, other in zip(memory.tensors(), theirs.tensors(), strict=True):
            assert_close(tensor, other, 1e-10)
        return memory, [*seen, at], rows

    for kind, number in turns:
        which = number % len(held)
        memory, seen, rows = held[which]
        if len(seen) == half:
            continue
        if kind in ("token", "both"):
            if kind == "both":
                held.append(go_on(which, half))
            held[which if number % 2 else -1] = go_on(which, 0)
        elif kind == "rows":
            held.append((memory.select(torch.tensor([len(rows) - 1])), seen, rows[-1:]))
        else:
            other = memory.map(torch.clone) if kind == "clone" else copy.deepcopy(memory)
            held.append((other, seen, rows))


@torch.no_grad()
def test_nothing_is_stale_after_weights_change():
    arguments = inputs(40, key_dim=12)
    _, memory = follow_all(arguments, 0, 18)
    for name in ("norm_weight", "norm_bias"):
        before, _ = follow(arguments, 18, memory)
        arguments[name].mul_(1.5)
        check_follows(arguments, memory, before)
        before, _ = follow(arguments, 18, memory)
        arguments = {**arguments, name: arguments[name] * 0.5}  # another tensor
        check_follows(arguments, memory, before)


def check_follows(arguments, memory, before):
    found, _ = follow(arguments, 18, memory)
    wanted, _ = follow(arguments, 18, memory, backend="reference")
    assert_close(found, wanted, 1e-10)
    assert (found - before).abs().max() > 1e-3


def test_gradients_pass_as_if_nothing_were_prepared():
    arguments = inputs(30, key_dim=12)
    with torch.no_grad():
        _, memory = follow_all(arguments, 0, 18)
        newer, _ = follow(arguments, 18, memory)
    found = {}
    for backend in ("fused", "reference"):
        leaves = {n: t.clone().requires_grad_() for n, t in arguments.items()}
        output, memory_after = follow(leaves, 18, memory, backend=backend)
        with torch.no_grad():
            follow(arguments, 18, memory)
        assert all(spare_nbytes(tensor) == 0 for tensor in memory_after.tensors())
        assert_close(output, newer, 1e-10)
        found[backend] = torch.autograd.grad(
            output.sum(), [*leaves.values()], allow_unused=True, materialize_grads=True
        )
    for ours, theirs in zip(*found.values(), strict=True):
        assert_close(ours, theirs, 1e-10)


def test_inference_mode_is_left_and_entered():
    arguments = inputs(30, key_dim=12)
    wanted = kvm_attention(**arguments, **SETTINGS, backend="reference")
    memory = None
    for at in range(30):
        mode = torch.inference_mode if at % 3 else torch.no_grad
        with mode():
            output, memory = follow(arguments, at, memory)
        assert_close(output, wanted[:, :, at : at + 1], 1e-10)


class Written(TorchDispatchMode):
    """Counts the largest tensor that any operator of a block makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.largest = max(self.largest, storage.nbytes())
        return out


@pytest.mark.parametrize("without", [(), ("state_temperature", "window_temperature")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_copies_nothing_that_is_held(dtype, without):
    """But for one a chunk, no operator makes anything of the size of the window or the rows."""
    settings = {"chunk_size": 32, "budget": 64, "rotary_dim": 32}
    arguments = inputs(200, batch=1, heads=4, key_dim=64, value_dim=64)
    arguments = {n: t if n == "merge_gate" else t.to(dtype) for n, t in arguments.items()}
    arguments = {n: t for n, t in arguments.items() if n not in without}
    window, large = 4 * 64 * 64 * dtype.itemsize, []
    with torch.no_grad():
        _, memory = follow_all(arguments, 0, 97, **settings)
        for at in range(97, 192):
            pointers = memory.window_key.data_ptr(), memory.window_value.data_ptr()
            with Written() as written:
                _, memory = follow(arguments, at, memory, **settings)
            if written.largest >= window / 4:
                large.append(at)
            else:
                assert pointers == (memory.window_key.data_ptr(), memory.window_value.data_ptr())
    assert large == [97, 128, 129, 160, 161]  # a block leaves, and then there is room again


@torch.no_grad()
def test_bytes_that_come_on_top():
    arguments = inputs(50, key_dim=12, value_dim=10)
    _, memory = follow_all(arguments, 0, 18)
    heads, size = arguments["key"].shape[0] * arguments["key"].shape[1], 8
    for at in range(18, 50):
        _, memory = follow(arguments, at, memory)
        token, width = heads * (12 + 10 + 1) * size, 12 - SETTINGS["rotary_dim"] + 4
        rows = (heads * memory.num_rows * (width + 10) + 12 * width) * size
        spare = -memory.window_length % CHUNK
        expected = 0 if at % CHUNK == 0 else spare * token + rows  # a block has just left
        assert memory.prepared_nbytes() == expected
        assert spare < CHUNK
        others = (memory.map(torch.clone), memory.select(torch.tensor([0])))
        assert all(other.prepared_nbytes() == 0 for other in others)
    again = pickle.loads(pickle.dumps(memory.rows))
    assert again.prepared_nbytes() == 0
    assert all(map(torch.equal, again.tensors(), memory.rows.tensors()))


@torch.no_grad()
def test_room():
    tensor = torch.arange(6.0).view(1, 3, 2)
    new = torch.full((1, 1, 2), 9.0)
    with torch.enable_grad():
        assert spare_nbytes(appended(tensor, new, 1, 8)) == 0
    first = appended(tensor, new, 1, 8)
    second = appended(first, new, 1, 8)
    assert second.data_ptr() == first.data_ptr() != tensor.data_ptr()
    other = appended(first, -new, 1, 8)  # the slot is taken
    assert other.data_ptr() != first.data_ptr()
    assert torch.equal(other, torch.cat([first, -new], dim=1))
    assert torch.equal(second, torch.cat([tensor, new, new], dim=1))
    assert spare_nbytes(second) == 3 * 2 * 4
    full = appended(second, new.expand(1, 3, 2), 1, 8)
    assert (full.data_ptr(), spare_nbytes(full)) == (second.data_ptr(), 0)
    more = appended(full, new, 1, 8)
    assert (more.shape, spare_nbytes(more)) == ((1, 9, 2), 7 * 2 * 4)
    part = second[:, :5]  # the same numbers, but not the tensor that has the room
    assert appended(part, -new, 1, 8).data_ptr() != second.data_ptr()
    apart = copy.deepcopy(second)
    assert torch.equal(appended(apart, -new, 1, 8)[:, :5], second)
    turned = appended(tensor, new, 1, 8, channels_first=True)
    assert torch.equal(turned, first)
    assert turned.stride() == (16, 1, 8)
    back = appended(turned, new, 1, 8)  # the slots are there in another order
    assert torch.equal(back, second)
    assert back.stride() == (16, 2, 1)
    assert appended(turned, new, 1, 8, channels_first=True).data_ptr() == turned.data_ptr()
