"""What mixtures of cache operations, and of good and bad numbers, broke once."""

import pytest
import torch

from meanbank import MeanbankCache, batch_invariant
from meanbank.ops import kvm_attention, ovq_attention
from meanbank.ops.kvm.api import BACKENDS
from tests.conformance.models import make_model

KINDS = ["kvm_power_law", "ovq", "rwkv7", "full", "sliding_window_sink"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def small(kind, dtype=torch.float64):
    return make_model(kind, "bank", "grouped", dtype, layers=2)


@torch.inference_mode()
def feed(model, cache, ids, **arguments):
    return model(ids, cache=cache, **arguments).logits


def masks(*lengths, width):
    """Right-padded rows of these lengths."""
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", [*BACKENDS, "ovq"])
@pytest.mark.parametrize("place", [(0, 0), (2, 1)])
def test_what_is_no_number_stays_in_its_row_and_head(backend, wrong, place):
    query, key, value = torch.randn(3, 3, 2, 64, 8)

    def attend(key):
        if backend == "ovq":
            budget = lambda seen: 6  # noqa: E731
            return ovq_attention(query, key, value, torch.ones(2), chunk_size=4, budget=budget)
        one = torch.ones(8)
        settings = {"norm_weight": one, "norm_bias": 0 * one, "rotary_dim": 4, "chunk_size": 4}
        return kvm_attention(query, key, value, budget=6, backend=backend, **settings)

    clean, broken = attend(key), key.clone()
    broken[(*place, 5, 6)] = wrong
    found = attend(broken)
    others = torch.ones(3, 2, dtype=torch.bool)
    others[place] = False
    assert torch.equal(found[others], clean[others])
    assert torch.equal(found[place][:5], clean[place][:5])  # nothing before it, either


@every_kind
@pytest.mark.parametrize("restored", [False, True])
def test_files_know_which_documents_their_rows_are_in(kind, restored, tmp_path):
    model, ids, path = small(kind), torch.randint(40, (2, 20)), tmp_path / "one.ctx"
    documents = torch.tensor([[7], [-3]]).expand(2, 8)
    cache = model.model.new_cache()
    feed(model, cache, ids[:, :8], document_ids=documents)
    cache.save(path, model)
    loaded = MeanbankCache.load(path, model)
    if restored:
        loaded = model.model.new_cache().restore(path, model)
    assert loaded.documents == (7, -3)
    further = torch.tensor([[7], [5]]).expand(2, 4)  # one goes on, the other begins
    wanted = feed(model, cache, ids[:, 8:12], document_ids=further)
    assert torch.equal(feed(model, loaded, ids[:, 8:12], document_ids=further), wanted)
    assert loaded.lengths == cache.lengths == (12, 4)


@pytest.mark.parametrize("kind", ["kvm_power_law", "ovq"])
def test_rows_with_and_without_provenance_meet(kind, tmp_path):
    model, ids, path = small(kind), torch.randint(40, (2, 14)), tmp_path / "one.ctx"
    cache = model.model.new_cache()
    feed(model, cache, ids[:, :13], attention_mask=masks(13, 0, width=13))
    cache.save(path, model)
    cache = model.model.new_cache()
    cache.activate_provenance()
    cache.restore(path, model)
    feed(model, cache, ids[:, :13], attention_mask=masks(0, 13, width=13))
    never = model.model.new_cache()
    feed(model, never, ids[:, :13])
    found, wanted = (feed(model, x, ids[:, 13:]) for x in (cache, never))
    assert (found - wanted).abs().max() <= 1e-10
    with pytest.raises(ValueError, match="was not recorded"):
        cache.provenance(1)


def test_the_provenance_of_a_row_without_tokens_is_empty():
    model, ids = small("kvm_power_law"), torch.randint(40, (2, 13))
    cache = model.model.new_cache()
    cache.activate_provenance()
    feed(model, cache, ids, attention_mask=masks(13, 0, width=13))
    assert cache.provenance(1, 1).rows.shape == (2, 0)
    cache.provenance(1, 0).rows.zero_()  # the reader's own
    assert cache.provenance(1, 0).rows.any()


@every_kind
def test_a_cache_that_forgot_everything_is_a_new_one(kind):
    model, ids = small(kind), torch.randint(40, (3, 9))
    cache = model.model.new_cache()
    cache.activate_past_recording()
    feed(model, cache, ids[:2, :5])
    cache.crop(-5)
    assert (cache.lengths, cache.documents, cache.seen, cache.nbytes()) == ((), (), 0, 0)
    cache.activate_provenance()
    with batch_invariant():
        logits = feed(model, cache, ids)  # of another batch size
    assert (logits - model(ids, use_cache=False).logits).abs().max() <= 1e-10
    cache.crop(-4)


@every_kind
def test_rows_read_one_by_one_keep_their_own_records(kind):
    model, ids = small(kind), torch.randint(40, (2, 12))
    undoable = []
    for alone in (False, True):
        cache = model.model.new_cache()
        cache.activate_past_recording(7)
        for mask, part in ((masks(9, 0, width=9), ids[:, :9]), (None, ids[:, 9:])):
            if alone:
                with batch_invariant():
                    feed(model, cache, part, attention_mask=mask)
            else:
                feed(model, cache, part, attention_mask=mask)
        undoable.append([cache.select([row]).undoable for row in range(2)])
    assert undoable[0] == undoable[1] == [7 if kind != "full" else 12, 3] or kind == "full"


@every_kind
def test_rows_read_with_and_without_autocast_meet(kind):
    model, ids = small(kind, torch.float32), torch.randint(40, (2, 16))
    cache = model.model.new_cache()
    feed(model, cache, ids[:, :13], attention_mask=masks(13, 0, width=13))
    with torch.autocast("cpu", torch.bfloat16):
        feed(model, cache, ids[:, :13], attention_mask=masks(0, 13, width=13))
    logits = feed(model, cache, ids[:, 13:])
    wanted = model(ids, use_cache=False).logits[:, 13:]
    assert (logits[0] - wanted[0]).abs().max() <= 1e-2  # its last token went through bf16, too
    assert (logits[1] - wanted[1]).abs().max() <= 1.0


def test_operators_refuse_what_is_empty_and_budgets_that_are_no_numbers():
    x, one = torch.randn(1, 1, 9, 4), torch.ones(4)
    settings = {"norm_weight": one, "norm_bias": one, "rotary_dim": 2, "chunk_size": 2}
    with pytest.raises(ValueError, match="must not be empty"):
        kvm_attention(x[:0], x[:0], x[:0], budget=4, **settings)
    for budget, words in (
        (lambda seen: float("inf"), "got inf after"),
        (lambda seen: float("nan"), "got nan after"),
        (True, "got True"),
    ):
        with pytest.raises(ValueError, match=words):
            kvm_attention(x, x, x, budget=budget, **settings)
