"""Where tokens went: the rows of every memory, told token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanbank.core.geometry import Geometry
from meanbank.core.layout import Span
from meanbank.core.record import Record
from meanbank.core.values import DenseValues
from meanbank.memory import KVM, PowerLaw
from meanbank.memory.operator import unmarked
from meanbank.ops import kvm_attention
from tests.conformance.models import CHUNK, MEMORIES, make_model

COMPRESSED = [name for name in MEMORIES if name.startswith(("kvm", "ovq"))]


def recording(model):
    cache = model.model.new_cache()
    cache.activate_provenance()
    return cache


@torch.inference_mode()
def feed(model, cache, ids, **arguments):
    return model(ids, cache=cache, **arguments).logits


@pytest.mark.parametrize("memory", COMPRESSED)
def test_every_older_token_is_in_one_row_of_each_head(memory):
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    cache, ids = recording(model), torch.randint(40, (2, 30))
    feed(model, cache, ids[:, :17]), feed(model, cache, ids[:, 17:])
    for layer, described in enumerate(cache.describe().layers):
        found = cache.provenance(layer, 1)
        count = described.rows[1]
        assert found.rows.shape == (2, 30 - described.exact[1])
        assert found.rows.dtype == torch.int32
        for head in range(2):
            parts = [found.tokens(head, row) for row in range(count)]
            assert sorted(torch.cat(parts).tolist()) == list(range(30 - described.exact[1]))
            assert all(len(part) and part.equal(part.sort().values) for part in parts)
            # rows are opened by the tokens that come first in them, in the order of chunks
            opened = torch.stack([part[0] for part in parts]) // CHUNK
            assert opened.equal(opened.sort().values)
        assert sum(len(found.tokens(0, row)) > 1 for row in range(count)) > 0


@pytest.mark.parametrize("memory", ["kvm_counts", "ovq"])
def test_counts_of_a_memory_are_those_of_its_provenance(memory):
    model = make_model(memory, "projection", "heads", torch.float64, layers=2)
    cache = recording(model)
    feed(model, cache, torch.randint(40, (2, 50)))
    for layer, held in enumerate(cache.layers):
        rows = held.state.attention.memory.memory.rows
        counts = rows.scale if memory == "kvm_counts" else rows.count
        for sequence in range(2):
            found = cache.provenance(layer, sequence).rows
            for head, destinations in enumerate(found):
                wanted = destinations.long().bincount(minlength=counts.shape[2])
                assert torch.equal(counts[sequence, head], wanted.double())


@given(length=st.integers(1, 70), window=st.integers(1, 3), count=st.integers(1, 30))
@settings(max_examples=40)
def test_rows_are_sums_of_the_values_of_their_tokens(length, window, count):
    query, key, value = torch.randn(3, 2, 2, length, 8, dtype=torch.float64)
    trace, one = [], torch.ones(8, dtype=torch.float64)
    _, memory = kvm_attention(
        query,
        key,
        value,
        norm_weight=one,
        norm_bias=0 * one,
        rotary_dim=4,
        chunk_size=5,
        window_chunks=window,
        sink=2,
        budget=count,
        return_memory=True,
        trace=trace,
    )
    if not trace:
        assert memory.rows is None
        return
    went = torch.cat([update.destination for update in trace], dim=2)
    sums = torch.zeros_like(memory.rows.value)
    sums.scatter_add_(2, went[..., None].expand(*went.shape, 8), value[:, :, : went.shape[2]])
    assert (sums - memory.rows.value).abs().max() <= 1e-12
    assert went.shape[2] == length - memory.window_length


@pytest.mark.parametrize("memory", ["kvm_power_law", "kvm_one_chunk_no_gate", "ovq"])
@settings(max_examples=10)
@given(
    calls=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=6),
)
def test_rolled_back_and_reordered(memory, calls):
    """Forgetting tokens forgets where they went; rows of a batch take theirs along."""
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    cache, text = recording(model), torch.empty(3, 0, dtype=torch.long)
    cache.activate_past_recording(7)
    for length, wanted in calls:
        new = torch.randint(40, (3, length))
        feed(model, cache, new)
        tokens = min(wanted, cache.undoable)
        cache.crop(-tokens)
        text = torch.cat([text, new], dim=1)
        text = text[:, : text.shape[1] - tokens]
        order = torch.randperm(3)
        cache.reorder_cache(order)
        text = text[order]
    if not text.numel():
        return
    never = recording(model)
    feed(model, never, text)
    for layer in range(2):
        for sequence in range(3):
            found = cache.provenance(layer, sequence).rows
            assert torch.equal(found, never.provenance(layer, sequence).rows)


def test_rows_at_different_places():
    model = make_model("kvm_power_law", "bank", "grouped", torch.float64, layers=2)
    cache, ids, lengths = recording(model), torch.randint(40, (3, 26)), (26, 3, 17)
    mask = torch.arange(26) >= 26 - torch.tensor(lengths)[:, None]
    feed(model, cache, ids, attention_mask=mask.long())
    for row, length in enumerate(lengths):
        alone = recording(model)
        feed(model, alone, ids[row : row + 1, 26 - length :])
        assert torch.equal(cache.provenance(1, row).rows, alone.provenance(1).rows)


def test_what_it_costs_and_where_it_is_not():
    """4 bytes a token and head; of joined caches all or none have it, and it is not asked late."""
    model = make_model("kvm_power_law", "bank", "grouped", torch.float64, layers=2)
    cache, plain, ids = recording(model), model.model.new_cache(), torch.randint(40, (2, 41))
    feed(model, cache, ids), feed(model, plain, ids)
    older = 41 - cache.describe().layers[0].exact[0]
    assert cache.nbytes() - plain.nbytes() == 2 * 2 * 2 * older * 4  # layers, sequences, heads
    assert type(cache).join([cache, cache]).nbytes() == 2 * cache.nbytes()
    joined = type(cache).join([cache, plain])
    assert joined.nbytes() == 2 * plain.nbytes()
    for wrong, words in (
        (lambda: joined.provenance(0), "was not recorded"),
        (plain.activate_provenance, "from the first token on"),
        (lambda: cache.provenance(2), "no layer 2: the cache has 2"),
        (lambda: cache.provenance(0, 2), "no sequence 2: the cache has 2"),
        (lambda: model.model.new_cache().provenance(0), "is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    full = make_model("full", "bank", "grouped", torch.float64, layers=2)
    cache = recording(full)
    feed(full, cache, ids)
    with pytest.raises(ValueError, match="no memory of compressed rows"):
        cache.provenance(0)


@pytest.mark.parametrize("memory", COMPRESSED)
def test_every_row_is_opened_by_one_token(memory):
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    cache, ids = recording(model), torch.randint(40, (2, 41))
    feed(model, cache, ids[:, :13])
    for token in range(13, 41):
        feed(model, cache, ids[:, token : token + 1])
    whole = recording(model)
    feed(model, whole, ids)
    for layer, described in enumerate(cache.describe().layers):
        found = cache.provenance(layer, 1)
        for head in range(2):
            opened = found.rows[head][found.opened[head]]
            assert sorted(opened.tolist()) == list(range(described.rows[1]))
        assert torch.equal(found.opened, whole.provenance(layer, 1).opened)


def test_the_radius_of_a_row_is_of_the_token_that_opened_it():
    """Also where an earlier token of its block was merged into it."""
    sizes = Geometry(
        hidden_size=8, num_heads=1, num_kv_heads=1, key_dim=4, value_dim=5, rotary_dim=2
    )
    memory = KVM(chunk_size=8, budget=PowerLaw(factor=2)).build(sizes).double()
    query, key = torch.randn(2, 1, 1, 100, 4, dtype=torch.float64)
    value, x = torch.randn(1, 1, 100, 5).double(), torch.randn(1, 100, 8).double()
    span = Span(0, 100, record=Record(provenance=True))
    _, state = memory(query, key, DenseValues(value), x, None, span)
    rows, opened = (found[0, 0] for found in unmarked(state.destination))
    scale = torch.zeros(int(rows.max()) + 1).double()
    scale[rows[opened].long()] = value[0, 0, : len(rows)][opened].norm(dim=-1)
    assert torch.allclose(scale, state.memory.rows.scale[0, 0])
    first = [int((rows == row).nonzero()[0]) for row in range(len(scale))]
    assert not opened[first].all()
