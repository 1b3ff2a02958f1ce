"""Budgets against the paper's numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanbank.core.geometry import Geometry
from meanbank.memory import KVM, Fixed, PowerLaw, Saturating

GEOMETRY = Geometry(
    hidden_size=768, num_heads=6, num_kv_heads=6, key_dim=128, value_dim=128, rotary_dim=64
)


def test_the_papers_budgets():
    assert PowerLaw()(32768) == 2896
    assert PowerLaw()(8192) == 1448
    assert PowerLaw(multiple=64)(8192) == 1408
    assert Saturating()(8192) == 910
    assert Fixed()(10**9) == 256
    assert PowerLaw(cap=100, min_rows=8)(10**9) == 100
    assert PowerLaw(min_rows=8)(0) == 8


@pytest.mark.parametrize(
    ("budget", "rows"),
    [(PowerLaw(), 2884 + 512), (Fixed(), 256 + 512), (Saturating(), 992 + 512)],
)
def test_rows_that_the_last_token_of_32k_reads(budget, rows):
    assert KVM(budget=budget).build(GEOMETRY).rows_max(32768) == rows


@given(st.integers(1, 10**7), st.integers(1, 10**4))
def test_saturating_stays_below_its_limit(seen, limit):
    rows = Saturating(limit=limit)(seen)
    assert 0 <= rows < limit or rows == limit * seen // (limit + seen)
    assert rows <= min(limit, seen)


@pytest.mark.parametrize("settings", [{"factor": 0}, {"exponent": -1}, {"factor": float("nan")}])
def test_nonsense_is_refused(settings):
    with pytest.raises(ValueError, match="must be positive"):
        PowerLaw(**settings)
