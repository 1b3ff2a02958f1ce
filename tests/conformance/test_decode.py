"""Decoding with what earlier tokens prepared: models give what they give in one pass."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from meanbank import MeanbankCache
from tests.conformance.models import CHUNK, make_model

TOLERANCE = 1e-10  # fp64
PLACES = [
    ("kvm_power_law", "bank"),
    ("kvm_power_law", "projection"),
    ("kvm_random_raw", "bank_fixed"),
    ("ovq", "bank_shared"),
]


@torch.inference_mode()
def feed(model, cache, ids, **arguments):
    return model(ids, cache=cache, **arguments).logits


@st.composite
def turns(draw):
    kinds = ["token", "token", "token", "token", "fork", "crop", "select", "ragged"]
    return draw(st.lists(st.sampled_from(kinds), min_size=4, max_size=16))


@pytest.mark.parametrize(("memory", "source"), PLACES)
@settings(max_examples=6)
@given(turns=turns())
def test_forks_crops_and_selections_in_turns(memory, source, turns):
    """Each of two caches that share their past is what its rows are alone; provenance too."""
    model = make_model(memory, source, "grouped", torch.float64, layers=2)
    first = model.model.new_cache()
    first.activate_past_recording(3)
    first.activate_provenance()
    texts = torch.randint(40, (2, 2 * CHUNK + 1)).tolist()
    feed(model, first, torch.tensor(texts))
    held = [(first, texts), (first.select([0, 1]), [[*text] for text in texts])]
    for number, kind in enumerate(turns):
        at = number % 2
        cache, texts = held[at]
        new = torch.randint(40, (len(texts), 1))
        if kind == "fork":
            cache = cache.select([*range(len(texts))])  # all rows: the states are shared
            held[1 - at] = (cache, [[*text] for text in texts])
        elif kind == "crop" and cache.undoable:
            cache.crop(-1)
            held[at] = (cache, [text[:-1] for text in texts])
        elif kind == "select":
            held[at] = (cache.select([1, 1]), [[*texts[1]], [*texts[1]]])
        else:
            mask = torch.tensor([[1], [0 if kind == "ragged" else 1]])
            logits = feed(model, cache, new, attention_mask=mask)
            texts = [
                [*text, token] if there else text
                for text, [token], [there] in zip(texts, new.tolist(), mask.tolist(), strict=True)
            ]
            held[at] = (cache, texts)
            for row in (0,) if kind == "ragged" else (0, 1):
                wanted = model(torch.tensor([texts[row]]), use_cache=False).logits[0, -1]
                assert (logits[row, -1] - wanted).abs().max() <= TOLERANCE
    for cache, texts in held:
        assert cache.lengths == tuple(map(len, texts))
        for row, text in enumerate(texts):
            alone = model.model.new_cache()
            alone.activate_provenance()
            feed(model, alone, torch.tensor([text]))
            for layer in range(2):
                found, wanted = (c.provenance(layer, r) for c, r in ((cache, row), (alone, 0)))
                assert torch.equal(found.rows, wanted.rows)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("source", ["bank", "bank_fixed", "projection"])
def test_nothing_is_stale_after_weights_change(source, batch):
    """What is prepared is made anew: the cache goes on as one that was never decoded from."""
    model = make_model("kvm_power_law", source, "grouped", torch.float64, layers=2)
    ids = torch.randint(40, (batch, 40))
    cache, plain = model.model.new_cache(), model.model.new_cache()
    feed(model, cache, ids[:, :25])
    for at in range(25, 31):
        feed(model, cache, ids[:, at : at + 1])
    feed(model, plain, ids[:, :29]), feed(model, plain, ids[:, 29:31])
    assert cache.prepared_nbytes() > 0 == plain.prepared_nbytes()
    changed = [(name, p) for name, p in model.named_parameters() if _is_read_late(name)]
    assert len(changed) >= 4
    for at, (name, parameter) in enumerate(changed, 31):
        token = ids[:, at : at + 1]
        before = feed(model, cache.select(range(batch)), token)
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        found, wanted = feed(model, cache, token), feed(model, _copied(plain), token)
        assert (found - before).abs().max() > 1e-6, name
        assert (found - wanted).abs().max() <= TOLERANCE
        feed(model, plain, token)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(("memory", "source"), PLACES)
def test_gradients_of_one_fork_while_another_decodes(memory, source, length):
    """What a backward pass needs of the shared past is not written to."""
    model = make_model(memory, source, "grouped", torch.float64, layers=2)
    ids, found = torch.randint(40, (2, 40)), []
    for decoded in range(18, 18 + CHUNK + 1):
        cache = model.model.new_cache()
        with torch.no_grad():  # inference mode does not go with gradients
            model(ids[:, :17], cache=cache)
            for at in range(17, decoded):
                model(ids[:, at : at + 1], cache=cache)
        for learning in (cache.select([0, 1]), _copied(cache)):
            model.zero_grad()
            logits = model(ids[:, decoded : decoded + length], cache=learning).logits
            with torch.no_grad():
                for at in range(decoded, decoded + 3):
                    model(ids[:, at : at + 1], cache=cache)
            logits.sum().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        for ours, theirs in zip(*found[-2:], strict=True):
            assert (ours - theirs).abs().max() <= TOLERANCE * max(1, theirs.abs().max())


@pytest.mark.parametrize("source", ["projection", "projection_gated", "mixed_bank", "bank"])
@pytest.mark.parametrize("memory", ["kvm_power_law", "ovq"])
def test_autocast_for_some_tokens(memory, source):
    """A state that is held in one dtype and read in another goes on as its copy does."""
    model = make_model(memory, source, "grouped", torch.float32, layers=2)
    ids = torch.randint(40, (2, 45))
    cache = model.model.new_cache()
    feed(model, cache, ids[:, :20])
    for at in range(20, 45):
        with torch.autocast("cpu", torch.bfloat16, enabled=at % 5 in (1, 2)):
            token = ids[:, at : at + 1]
            wanted = feed(model, _copied(cache), token)
            assert torch.equal(feed(model, cache, token), wanted), at


def _is_read_late(name: str) -> bool:
    """Norms of memory rows and tables of banks: what derived numbers depend on."""
    return ".memory.norm." in name or "table" in name


def _copied(cache: MeanbankCache) -> MeanbankCache:
    """The cache in tensors of their own, with nothing prepared."""
    rows = [*range(len(cache.lengths))]
    return cache.repeat(2).select([2 * row for row in rows])


@pytest.mark.parametrize("source", ["bank", "projection"])
def test_files_and_copies_hold_the_contents_alone(source, tmp_path):
    model = make_model("kvm_power_law", source, "grouped", torch.float32, layers=2)
    ids = torch.randint(40, (2, 30))
    cache = model.model.new_cache()
    feed(model, cache, ids[:, :20])
    assert cache.prepared_nbytes() == 0
    for at in range(20, 22):
        feed(model, cache, ids[:, at : at + 1])
    prepared = cache.prepared_nbytes()
    described = cache.describe()
    assert sum(layer.nbytes.get("prepared", 0) for layer in described.layers) == prepared > 0
    assert described.nbytes == cache.nbytes() + prepared
    copied = _copied(cache)
    assert (copied.nbytes(), copied.prepared_nbytes()) == (cache.nbytes(), 0)
    cache.save(tmp_path / "decoded", model)
    assert copy.deepcopy(cache).prepared_nbytes() == 0
    pickled, alone = pickle.dumps(cache), pickle.dumps(copied)
    assert len(pickled) <= len(alone)
    assert pickle.loads(pickled).prepared_nbytes() == 0
    copied.save(tmp_path / "copied", model)
    with safe_open(tmp_path / "decoded", "pt") as one, safe_open(tmp_path / "copied", "pt") as two:
        assert sorted(one.keys()) == sorted(two.keys())
        assert all(torch.equal(one.get_tensor(k), two.get_tensor(k)) for k in one.keys())  # noqa: SIM118
    size = (tmp_path / "decoded").stat().st_size
    assert size == (tmp_path / "copied").stat().st_size
    loaded = MeanbankCache.load(tmp_path / "decoded", model)
    others = [loaded, copy.deepcopy(cache), pickle.loads(pickled), copied]
    for at in range(22, 30):
        token = ids[:, at : at + 1]
        wanted = feed(model, cache, token)
        assert all(torch.equal(feed(model, other, token), wanted) for other in others)


@pytest.mark.parametrize("source", ["bank", "projection"])
def test_what_is_kept_to_forget_tokens_has_nothing_prepared(source):
    """Rows before each update are in the record, but not once more as queries meet them."""
    model = make_model("kvm_power_law", source, "grouped", torch.float64, layers=2)
    ids = torch.randint(40, (2, 80))
    recording, plain = model.model.new_cache(), model.model.new_cache()
    recording.activate_past_recording(32)
    for at in range(80):
        feed(model, recording, ids[:, at : at + 1]), feed(model, plain, ids[:, at : at + 1])
        assert recording.prepared_nbytes() == plain.prepared_nbytes()
    recording.crop(-30)
    again = model.model.new_cache()
    feed(model, again, ids[:, :50])
    for at in range(50, 60):
        wanted = feed(model, again, ids[:, at : at + 1])
        assert (feed(model, recording, ids[:, at : at + 1]) - wanted).abs().max() <= TOLERANCE


def test_a_bank_makes_only_new_tokens_dense(monkeypatch):
    model = make_model("kvm_power_law", "bank", "grouped", torch.float32, layers=2)
    ids, looked_up = torch.randint(40, (1, 40)), []
    embedding = torch.nn.functional.embedding

    def counted(index, table, *arguments, **settings):
        looked_up.append(index.numel())
        return embedding(index, table, *arguments, **settings)

    cache = model.model.new_cache()
    feed(model, cache, ids[:, :25])
    monkeypatch.setattr(torch.nn.functional, "embedding", counted)
    for at in range(25, 40):
        looked_up.clear()
        feed(model, cache, ids[:, at : at + 1])
        assert (max(looked_up) > 1) == (at % CHUNK in (0, 1) or at == 25), at
