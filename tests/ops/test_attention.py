"""Window attention against a dense mask, and rotary positions against complex numbers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meanbank.core.layout import Layout
from meanbank.core.room import appended
from meanbank.core.tail import Tail
from meanbank.core.values import BankedValues, DenseValues, Values
from meanbank.ops import full_attention, window_attention
from meanbank.ops.attention import BlockRule, SlidingRule, attention_of_one, full, window
from meanbank.ops.attention.window import key_positions
from meanbank.ops.rotary import Rotation, apply_rotary, rotary_angles
from meanbank.ops.token_shift import token_shift


def dense(query, key, value, rule):
    """All pairs, straight from the definition."""
    length = key.shape[2]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    if isinstance(rule, SlidingRule):
        near = columns > rows - rule.size
    else:
        near = columns // rule.size >= rows // rule.size - rule.blocks + 1
    mask = (columns <= rows) & (near | (columns < rule.sink))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


rules = st.one_of(
    st.builds(SlidingRule, st.integers(1, 9), st.integers(0, 4)),
    st.builds(BlockRule, st.integers(1, 5), st.integers(1, 3), st.integers(0, 7)),
)


@given(rules, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 8))
def test_windows_equal_the_definition_at_any_split(rule, splits, block):
    length = sum(splits)
    query = torch.randn(1, 4, length, 6, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, length, 6, dtype=torch.float64)
    expected = dense(query, key, value, rule)
    outputs, seen = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "QUERY_BLOCK", block)
        for part in splits:
            kept = [p for positions in key_positions(rule, seen) for p in positions]
            at_hand = torch.tensor([*kept, *range(seen, seen + part)])
            outputs.append(
                window_attention(
                    query[:, :, seen : seen + part],
                    key[:, :, at_hand],
                    value[:, :, at_hand],
                    rule,
                    seen,
                )
            )
            seen += part
    assert (torch.cat(outputs, dim=2) - expected).abs().max() <= 1e-12


@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 8))
def test_full_attention_continues(length, seen, block):
    query = torch.randn(2, 4, seen + length, 4, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, seen + length, 4, dtype=torch.float64)
    whole = full_attention(query, key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "QUERY_BLOCK", block)
        part = full_attention(query[:, :, seen:], key, value)
    assert (part - whole[:, :, seen:]).abs().max() <= 1e-12


@pytest.mark.parametrize(("length", "seen"), [(1500, 0), (1500, 500), (1, 1999)])
def test_no_mask_is_larger_than_a_block_of_queries(length, seen):
    query, key = torch.zeros(1, 2, length, 8), torch.zeros(1, 2, seen + length, 8)
    with Largest(torch.bool) as largest:
        full_attention(query, key, key)
    assert largest.numel <= full.QUERY_BLOCK * (seen + length)


@pytest.mark.parametrize("rule", [SlidingRule(300, 2), BlockRule(100, 3)])
def test_windows_hold_scores_of_a_block_only(rule):
    query = torch.empty(1, 2, 4000, 8, device="meta")
    with Largest() as largest:
        window_attention(query, query, query, rule)
    assert largest.numel <= 2 * window.QUERY_BLOCK * (rule.span + rule.sink + window.QUERY_BLOCK)


class Largest(TorchDispatchMode):
    """Sees the most numbers of a tensor that any operator returns."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.numel = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and self.dtype in (None, tensor.dtype):
                self.numel = max(self.numel, tensor.numel())
        return result


sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))


@given(sizes, st.booleans(), st.booleans())
def test_one_query_attends_as_any_other(sizes, banked, spare):
    batch, kv_heads, group, count = sizes
    query = torch.randn(batch, kv_heads * group, 1, 6, dtype=torch.float64)
    key = torch.randn(batch, kv_heads, count, 6, dtype=torch.float64)
    values = values_of(batch, kv_heads, count, banked)
    expected = full_attention(query, key, values.dense())
    if spare:
        with torch.no_grad():
            first, last = (values.part(torch.arange(batch), *at) for at in ((0, 1), (1, count)))
            values = first.standing_for(last.appended_to(first.stored(), 32))
            key = appended(key[:, :, :1], key[:, :, 1:], 2, 32)
    with torch.no_grad():
        output = attention_of_one(query, key, values)
    assert output.shape == expected.shape
    assert (output - expected).abs().max() <= 1e-12


def values_of(batch: int, heads: int, count: int, banked: bool, width: int = 5) -> Values:
    if not banked:
        return DenseValues(torch.randn(batch, heads, count, width, dtype=torch.float64))
    table = torch.randn(9, heads * width, dtype=torch.float64)
    return BankedValues(torch.randint(9, (batch, count)), table, 0.7, heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_query_in_half_precision_is_no_worse_than_products_and_a_softmax(dtype):
    query, key = torch.randn(2, 8, 1, 32).to(dtype), torch.randn(2, 8, 500, 32).to(dtype)
    value = torch.randn(2, 8, 500, 32).to(dtype)
    truth = full_attention(query.double(), key.double(), value.double())
    eager = torch.softmax(query @ key.mT / 32**0.5, dim=-1) @ value
    with torch.no_grad():
        roomy = appended(key[:, :, :300], key[:, :, 300:], 2, 256, channels_first=True)
        for held in (key, roomy):
            output = attention_of_one(query, held, DenseValues(value))
            assert (output - truth).square().mean() <= 1.1 * (eager - truth).square().mean()


def test_rotary_is_a_rotation_with_both_end_points():
    x = torch.randn(1, 1, 7, 10, dtype=torch.float64)
    angles = rotary_angles(torch.arange(7), 6, 100.0)
    assert torch.allclose(angles[1], torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
    turned = apply_rotary(x, Rotation.by(angles))
    pairs = torch.view_as_complex(x[..., :6].unflatten(-1, (3, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), -angles))
    assert torch.allclose(turned[..., :6], expected.flatten(-2))
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(apply_rotary(x, Rotation.by(rotary_angles(torch.arange(7), 0, 100.0))), x)


def test_rotary_keeps_long_positions_apart():
    """fp32 angles at position 2**24 would be off by whole radians at this frequency."""
    x = torch.randn(1, 1, 1, 4)
    rotation = Rotation.by(rotary_angles(torch.tensor([2**24 + 1]), 4, 1e4))
    far, exact = apply_rotary(x, rotation), apply_rotary(x.double(), rotation)
    assert (far - exact).abs().max() <= 1e-6


def test_token_shift():
    x = torch.arange(6.0).view(1, 3, 2)
    mix = torch.tensor([0.0, 0.5])
    expected = torch.tensor([[[0.0, 5.0], [2.0, 2.0], [4.0, 4.0]]])
    last = Tail(torch.full((1, 1, 2), 9.0), (0,))
    before = Layout.uniform(1, 1, 3).before(x, last, zero=True)
    assert torch.allclose(token_shift(x, mix, before), expected)
