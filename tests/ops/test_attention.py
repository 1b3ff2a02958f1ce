"""Window attention against a dense mask, and rotary positions against complex numbers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from meanbank.core.layout import Layout
from meanbank.core.tail import Tail
from meanbank.ops import full_attention, window_attention
from meanbank.ops.attention import BlockRule, SlidingRule, window
from meanbank.ops.attention.window import key_positions
from meanbank.ops.rotary import apply_rotary, rotary_angles
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


@given(st.integers(1, 20), st.integers(0, 20))
def test_full_attention_continues(length, seen):
    query = torch.randn(2, 4, seen + length, 4, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, seen + length, 4, dtype=torch.float64)
    whole = full_attention(query, key, value)
    assert (
        full_attention(query[:, :, seen:], key, value) - whole[:, :, seen:]
    ).abs().max() <= 1e-12


def test_rotary_is_a_rotation_with_both_end_points():
    x = torch.randn(1, 1, 7, 10, dtype=torch.float64)
    angles = rotary_angles(torch.arange(7), 6, 100.0)
    assert torch.allclose(angles[1], torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
    turned = apply_rotary(x, angles)
    pairs = torch.view_as_complex(x[..., :6].unflatten(-1, (3, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), -angles))
    assert torch.allclose(turned[..., :6], expected.flatten(-2))
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(apply_rotary(x, rotary_angles(torch.arange(7), 0, 100.0)), x)


def test_rotary_keeps_long_positions_apart():
    """fp32 angles at position 2**24 would be off by whole radians at this frequency."""
    x = torch.randn(1, 1, 1, 4)
    far = apply_rotary(x, rotary_angles(torch.tensor([2**24 + 1]), 4, 1e4))
    exact = apply_rotary(x.double(), rotary_angles(torch.tensor([2**24 + 1]), 4, 1e4))
    assert (far - exact).abs().max() <= 1e-6


def test_token_shift():
    x = torch.arange(6.0).view(1, 3, 2)
    mix = torch.tensor([0.0, 0.5])
    expected = torch.tensor([[[0.0, 5.0], [2.0, 2.0], [4.0, 4.0]]])
    last = Tail(torch.full((1, 1, 2), 9.0), (0,))
    before = Layout.uniform(1, 1, 3).before(x, last, zero=True)
    assert torch.allclose(token_shift(x, mix, before), expected)
