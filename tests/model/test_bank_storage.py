"""Tables that stay in a model's files or are int8: equal results, and nothing read but the rows."""

import copy
import functools
import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from meanbank import MeanbankCache, MeanbankForCausalLM, MeanbankModel
from meanbank.core.errors import BankStorageError
from meanbank.core.table import Int8Table, StoredTable, look_up, quantized
from meanbank.model.fingerprint import model_fingerprint
from tests.conformance.models import make_model
from tests.model.hf_models import random_ids

SOURCES = ["bank", "bank_shared", "mixed_bank", "gated_additive"]
every_source = pytest.mark.parametrize("source", SOURCES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gives the folder of a saved model with tables from `source`, in one file or in many."""

    @functools.cache
    def saved(source: str, memory: str = "kvm_power_law", shards: bool = False, dtype="float32"):
        path = tmp_path_factory.mktemp("model")
        size = {"max_shard_size": "4KB"} if shards else {}
        kind = getattr(torch, dtype)
        make_model(memory, source, "grouped", kind).save_pretrained(path, **size)
        assert (len(list(path.glob("*.safetensors"))) > 1) == shards
        return path

    return saved


def load(path, storage="resident", **keywords):
    model, report = MeanbankForCausalLM.from_pretrained(
        path, bank_storage=storage, output_loading_info=True, **keywords
    )
    assert not any(report.values())
    return model


def tables_of(model) -> list[StoredTable]:
    return [module for module in model.modules() if isinstance(module, StoredTable)]


def ids_read(model) -> list[set[int]]:
    """A set for each table, which fills with the ids that are looked up from now on."""
    read = []
    for table in tables_of(model):
        ids: set[int] = set()
        table.register_forward_pre_hook(
            lambda _, inputs, ids=ids: ids.update(inputs[0].flatten().tolist())
        )
        read.append(ids)
    return read


def logits_of(model, ids, pieces):
    """Logits of ids read in pieces of the given lengths."""
    cache, logits = model.model.new_cache(), []
    with torch.no_grad():
        for part in ids.split(pieces, dim=1):
            logits.append(model(part, cache=cache).logits)
    return torch.cat(logits, dim=1)


@every_source
@pytest.mark.parametrize(("dtype", "shards"), [("float32", False), ("bfloat16", True)])
def test_mapped_tables_give_the_same_bits(source, shards, dtype, folder):
    path = folder(source, shards=shards, dtype=dtype)
    resident, mapped = load(path), load(path, "mmap")
    ids, pieces = random_ids(2, 15), [9, 1, 1, 4]
    assert torch.equal(logits_of(mapped, ids, pieces), logits_of(resident, ids, pieces))
    prompt = {"input_ids": ids, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(mapped.generate(**prompt), resident.generate(**prompt))
    assert (
        len(mapped.model.stored_tables) == len(tables_of(mapped)) == 2 - (source == "bank_shared")
    )
    names = {name for name, _ in mapped.named_parameters()}
    assert not any("table" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_and_moves(dtype, folder):
    path, ids = folder("bank_shared"), random_ids(1, 12)
    expected = load(path, dtype=dtype)(ids).logits
    assert torch.equal(load(path, "mmap", dtype=dtype)(ids).logits, expected)
    moved = load(path, "mmap").to(dtype)
    assert torch.equal(moved(ids).logits, expected)
    assert torch.equal(copy.deepcopy(moved)(ids).logits, expected)


@pytest.fixture(scope="module")
def pair(folder):
    """A resident and a mapped model, and the ids that each table of the latter has looked up."""
    mapped = load(folder("bank"), "mmap")
    return load(folder("bank")), mapped, ids_read(mapped)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_only_rows_of_tokens_are_read(data, pair):
    resident, mapped, read = pair
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    token = st.integers(0, mapped.config.vocab_size - 1)
    rows = st.lists(token, min_size=length, max_size=length)
    ids = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    first = data.draw(st.integers(1, length))
    for looked_up in read:
        looked_up.clear()
    found = logits_of(mapped, ids, [first, *[1] * (length - first)])
    assert torch.equal(found, logits_of(resident, ids, [first, *[1] * (length - first)]))
    assert read == [set(ids.flatten().tolist())] * 2


def test_decoding_looks_up_no_token_twice(folder):
    """What was looked up once stays with the state, as with resident tables."""
    model = load(folder("bank"), "mmap")
    cache, ids = model.model.new_cache(), torch.arange(11)[None]
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        model(ids[:, 9:10], cache=cache)
        read = ids_read(model)
        model(ids[:, 10:], cache=cache)
    assert read == [{10}] * 2


def test_rows_are_asked_for_before_the_first_layer(folder, monkeypatch):
    model, asked = load(folder("bank_shared"), "mmap"), []
    monkeypatch.setattr(
        "meanbank.core.mapped_file.Mapped.prefetch",
        lambda self, ids: asked.append((ids.tolist(), started)),
    )
    started = False

    def start(*_):
        nonlocal started
        started = True

    model.model.layers[0].register_forward_pre_hook(start)
    model(torch.tensor([[7, 3, 7], [3, 3, 1]]))
    assert asked == [([1, 3, 7], False)]
    assert started


@every_source
def test_a_mapped_model_is_the_same_model(source, folder, tmp_path):
    path = folder(source)
    resident, mapped = load(path), load(path, "mmap")
    states = resident.state_dict(), mapped.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert model_fingerprint(mapped) == model_fingerprint(resident)
    mapped.save_pretrained(tmp_path / "copy")
    again = load_file(tmp_path / "copy" / "model.safetensors")
    assert all(torch.equal(again[name], states[0][name]) for name in states[0])
    ids = random_ids(1, 9)
    resident.prefill(ids).cache.save(tmp_path / "text.ctx", resident)
    cache = MeanbankCache.load(tmp_path / "text.ctx", mapped)
    found = mapped(ids, cache=cache).logits
    cache = MeanbankCache.load(tmp_path / "text.ctx", resident)
    assert torch.equal(found, resident(ids, cache=cache).logits)


def test_other_classes(folder, tmp_path):
    path, ids = folder("bank_shared"), random_ids(1, 9)
    whole = AutoModelForCausalLM.from_pretrained(path, bank_storage="mmap")
    backbone, report = MeanbankModel.from_pretrained(
        path, bank_storage="mmap", output_loading_info=True
    )
    assert report["unexpected_keys"] == {"lm_head.weight"}
    expected = load(path).model(ids).last_hidden_state
    assert torch.equal(whole.model(ids).last_hidden_state, expected)
    assert torch.equal(backbone(ids).last_hidden_state, expected)
    backbone.save_pretrained(tmp_path)
    again = MeanbankForCausalLM.from_pretrained(tmp_path, bank_storage="mmap")
    assert torch.equal(again.model(ids).last_hidden_state, expected)


def test_a_model_without_tables_has_nothing_to_store(folder):
    path, ids = folder("projection"), random_ids(1, 9)
    for storage in ("mmap", "int8"):
        model = load(path, storage)
        assert model.model.stored_tables == ()
        assert torch.equal(model(ids).logits, load(path)(ids).logits)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]), st.booleans())
def test_int8_is_off_by_half_a_scale_at_most(seed, size, half):
    generator = torch.Generator().manual_seed(seed)
    table = size * torch.randn(9, 6, generator=generator)
    table = table.bfloat16() if half else table
    table[3] = 0
    rows, scale = quantized(table, 2)
    stored = Int8Table([rows, scale], torch.float64).eval()
    off = (look_up(torch.arange(9), stored) - table.double()).abs().unflatten(1, (2, 3))
    assert (off <= 0.5 * scale.double()[..., None] * (1 + 1e-5)).all()
    assert not off[3].any()
    largest = table.float().unflatten(1, (2, 3)).abs().amax(2)
    torch.testing.assert_close(scale[:3], largest[:3] / 127)


@every_source
def test_int8_tables_are_saved_and_mapped(source, folder, tmp_path):
    path, ids = folder(source), random_ids(2, 12)
    model = load(path, "int8")
    tables = {name for name in model.state_dict() if "table" in name}
    assert {name.rpartition(".")[2] for name in tables} == {"rows", "scale"}
    expected = model(ids).logits
    exact = load(path)(ids).logits
    assert 0 < (expected - exact).abs().max() < 0.05 * exact.abs().max()
    model.save_pretrained(tmp_path)
    for storage in ("mmap", "int8"):
        again = load(tmp_path, storage)
        assert torch.equal(again(ids).logits, expected)
        assert model_fingerprint(again) == model_fingerprint(model)
    assert model_fingerprint(model) != model_fingerprint(load(path))
    with pytest.raises(BankStorageError, match=r"int8.*give bank_storage='int8' or 'mmap'$"):
        load(tmp_path)


def test_what_is_stored_is_not_trained(folder):
    for storage in ("mmap", "int8"):
        model = load(folder("bank"), storage).train()
        with pytest.raises(BankStorageError, match=r"bank_storage='resident', or call model.eval"):
            model(random_ids(1, 5))
        with torch.no_grad():
            model(random_ids(1, 5))
        with pytest.raises(BankStorageError, match="cannot be loaded again"):
            model.load_state_dict(model.state_dict())


def test_a_mapped_file_is_not_overwritten(folder, tmp_path):
    shutil.copytree(folder("bank"), tmp_path / "model")
    model = load(tmp_path / "model", "mmap")
    with pytest.raises(BankStorageError, match="save to another folder"):
        model.save_pretrained(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(BankStorageError, match="save to another folder"):
        model.save_pretrained(tmp_path / "link")


def change(path, name, value):
    tensors = load_file(path)
    del tensors[name]
    save_file({**tensors, **value}, path, metadata={"format": "pt"})


TABLE = "model.layers.1.attention.values.table"
DAMAGES = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-5]), "cannot map"),
    "empty": (lambda path: path.write_bytes(b""), "cannot map"),
    "no header": (lambda path: path.write_bytes(b"\xff" * 4096), "cannot map"),
    "no table": (lambda path: change(path, TABLE, {}), r"have no layers\.1.*\.table"),
    "shape": (lambda path: change(path, TABLE, {TABLE: torch.ones(3, 12)}), r"shape \(40, 12\)"),
    "dtype": (
        lambda path: change(path, TABLE, {TABLE: torch.ones(40, 12, dtype=torch.int8)}),
        "is I8 of shape",
    ),
    "half int8": (
        lambda path: change(path, TABLE, {TABLE + ".rows": torch.ones(40, 12).to(torch.int8)}),
        r"have no layers\.1.*\.table\.scale",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage, folder, tmp_path):
    shutil.copytree(folder("bank"), tmp_path / "model")
    harm, message = DAMAGES[damage]
    harm(tmp_path / "model" / "model.safetensors")
    with pytest.raises(BankStorageError, match=message) as error:
        load(tmp_path / "model", "mmap")
    assert "\n" not in str(error.value)


def test_choices_and_files_that_cannot_be_mapped(folder, tmp_path):
    with pytest.raises(ValueError, match=r"unknown bank_storage 'map'; choose one of mmap, "):
        load(folder("bank"), "map")
    model = load(folder("bank"))
    with pytest.raises(BankStorageError, match="there are none"):
        MeanbankForCausalLM.from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), bank_storage="mmap"
        )
    with pytest.raises(ValueError, match="not finite"):
        quantized(torch.tensor([[1.0, torch.nan]]), 1)
    assert json.loads((folder("bank") / "config.json").read_text()).get("bank_storage") is None
