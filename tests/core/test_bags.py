"""Weighted sums of rows of a table against products."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanbank.core.bags import numbers, sums_of_channels, sums_of_rows, sums_of_tokens
from meanbank.core.room import appended

sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 5))


@given(sizes)
def test_rows_of_a_table(sizes):
    heads, group, count, width = sizes
    table = torch.randn(7, width, dtype=torch.float64)
    rows = torch.randint(7, (heads, group, count), dtype=torch.int32)
    weights = torch.randn(heads, group, count, dtype=torch.float64)
    expected = (weights[..., None] * table[rows.long()]).sum(dim=-2)
    assert (sums_of_rows(table, rows, weights) - expected).abs().max() <= 1e-12


@given(sizes, st.integers(0, 9))
def test_tokens_with_and_without_room(sizes, held):
    heads, group, count, width = sizes
    values = torch.randn(heads, count, width, dtype=torch.float64)
    weights = torch.randn(heads, group, count, dtype=torch.float64)
    held = min(held, count)
    with torch.no_grad():
        roomy = appended(values[:, :held], values[:, held:], 1, 16)
    for read in (values, roomy):
        assert (sums_of_tokens(weights, read) - weights @ values).abs().max() <= 1e-12


@given(sizes, st.integers(0, 9))
def test_channels_with_room(sizes, held):
    heads, group, count, width = sizes
    keys = torch.randn(1, heads, count, width, dtype=torch.float64)
    query = torch.randn(heads, group, width, dtype=torch.float64)
    held = min(held, count)
    with torch.no_grad():
        roomy = appended(keys[:, :, :held], keys[:, :, held:], 2, 16, channels_first=True)
    scores = sums_of_channels(query, roomy.flatten(0, 1))
    assert (scores - query @ keys[0].mT).abs().max() <= 1e-12


@pytest.mark.parametrize("table", ["parameter", "learned weights"])
def test_what_only_a_gradient_needs_is_not_made(table):
    weights = torch.randn(1, 1, 3, requires_grad=table != "parameter")
    rows = torch.randn(5, 4, requires_grad=table == "parameter")
    sums = sums_of_rows(rows, torch.tensor([[[0, 1, 4]]], dtype=torch.int32), weights)
    assert not sums.requires_grad


def test_numbers_are_kept_once_for_all_counts():
    cpu = torch.device("cpu")
    found = [numbers(count, cpu) for count in range(1, 5000)]
    assert all(torch.equal(x, torch.arange(len(x))) for x in found[:70])
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
    assert sum(kept.values()) <= 4 * 5000 * 4
    with torch.device("meta"):
        assert numbers(10_000, cpu).device.type == "cpu"
