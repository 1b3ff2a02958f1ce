"""What parts are worth, against models without them."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from meanbank.core.geometry import Geometry
from meanbank.core.layout import Span
from meanbank.core.values import DenseValues
from meanbank.data import PackedTokens
from meanbank.evaluation import BitsPerByte, Parts
from meanbank.evaluation.base import Subject
from meanbank.evaluation.driver import run_evaluation
from meanbank.evaluation.losses import token_losses
from meanbank.evaluation.parts import WindowOfKVM, parts_of
from meanbank.memory import KVM, Fixed
from tests.conformance.models import KVM as SMALL
from tests.conformance.models import SOURCES, make_model

NAMES = {
    "bank": ["bank"],
    "bank_fixed": ["bank"],
    "bank_shared": ["bank"],
    "first_layer": ["first_layer"],
    "first_layer_fixed": ["first_layer"],
    "first_layer_per_head": ["first_layer"],
    "initial_embedding": ["initial_embedding"],
    "mixed_first_layer": ["contextual", "first_layer"],
    "mixed_initial_embedding": ["contextual", "initial_embedding"],
    "mixed_bank": ["contextual", "bank"],
    "gated_additive": ["table"],
}
LENGTH = 12
DOCUMENT = [*np.random.default_rng(0).integers(1, 40, 59).tolist(), 0]
TWO_DOCUMENTS = [*DOCUMENT[:17], 0, *DOCUMENT[18:]]
SIZES = np.array([0, *([2] * 39)])


def layered(source: str, memory="full", backbone="gptalpha2"):
    """Two layers of which the last has the source, all parameters at random."""
    plan = [{"memory": memory}, {"where": [1], "values": SOURCES[source]}]
    model = make_model(
        "full", "projection", "grouped", torch.float64, layers=2, plan=plan, backbone=backbone
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return model


def subject(model, text=DOCUMENT, **changes) -> Subject:
    tokens = np.array(text, dtype=np.uint16)
    held_out = PackedTokens(tokens=tokens, offsets=np.array([0, len(tokens)]))
    corpus = SimpleNamespace(held_out=held_out, token_bytes=SIZES, end_of_text_id=0)
    given = {"open_corpus": lambda: corpus, "training_length": LENGTH} | changes
    return Subject(name="small", model=model, **given)


@pytest.mark.parametrize("source", NAMES)
def test_left_out_is_zero_and_comes_back(source):
    model, ids = layered(source), torch.randint(40, (2, 20))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters())
    whole = model(ids).logits.detach()
    parts = parts_of(model)
    assert list(parts) == [f"1.{name}" for name in NAMES[source]]
    for part in parts.values():
        wanted = copy.deepcopy(model)
        values = wanted.model.layers[1].attention.values
        zero_by_hand(values, part.name)
        with part.left_out():
            without = model(ids).logits.detach()
        assert torch.allclose(without, wanted(ids).logits, atol=1e-12)
        assert not torch.allclose(without, whole)
        with pytest.raises(KeyError), part.left_out():
            raise KeyError
        assert torch.equal(model(ids).logits, whole)
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(objects[name] is parameter for name, parameter in model.named_parameters())


def zero_by_hand(values: nn.Module, part: str) -> None:
    """Leave a part out by other means: its projection, its table, what it reads."""
    with torch.no_grad():
        if part == "table":
            values.table.zero_()
        elif part == "contextual":
            values.contextual.forward = zeroed(values.contextual.forward)
        elif getattr(values, "other", None) is not None:
            values.other.forward = zeroed(values.other.forward)
        elif part == "initial_embedding" and hasattr(values, "contextual_weight"):
            values._initial = lambda start, context: torch.zeros(*start.shape[:2], 12).double()
        else:
            values.forward = zeroed(values.forward)


def zeroed(forward):
    """The same with values of zero."""

    def without(*arguments):
        values, state = forward(*arguments)
        return DenseValues(torch.zeros_like(values.dense())), state

    return without


def test_what_is_reported():
    model = layered("mixed_first_layer", SMALL)
    evaluation = Parts(max_tokens=None, batch_size=3)
    outcome = run_evaluation(evaluation, subject(model))
    whole, parts = outcome.results["whole"], outcome.results["parts"]
    assert whole["windows"] == 4
    assert [(p["layer"], p["part"]) for p in parts] == [
        (0, "memory"), (1, "contextual"), (1, "first_layer"), (1, "memory"),
    ]  # fmt: skip
    tokens = torch.tensor([DOCUMENT[s : s + LENGTH + 1] for s in range(0, 48, LENGTH)])
    counted = torch.tensor(SIZES)[tokens[:, 1:]] > 0
    losses = token_losses(model, tokens)
    loss = losses[counted].mean().item()
    assert whole["nats_per_token"] == pytest.approx(loss)
    assert whole["bpb"] == pytest.approx(loss / math.log(2) / 2)
    with torch.no_grad():
        model.model.layers[1].attention.values.other_weight.zero_()
    other = token_losses(model, tokens)
    found = parts[2]
    assert found["loss_without"] == pytest.approx(other[counted].mean().item())
    assert found["difference"] == pytest.approx(found["loss_without"] - loss, abs=1e-6)
    spread = (other - losses).double().mean(dim=1).std().item()
    assert found["standard_error"] == pytest.approx(spread / 2, rel=1e-4)
    assert outcome.scores == {f"parts:{p['layer']}.{p['part']}": p["difference"] for p in parts}
    assert outcome.prompt_hash is not None


@pytest.mark.parametrize("changes", [{"isolated": True}, {"prefix": (7,)}])
def test_the_whole_is_what_bpb_tells(changes):
    """Where documents are kept apart, or texts have a prefix, without parts too."""
    model = layered("bank", SMALL)
    plain = run_evaluation(Parts(), subject(model, TWO_DOCUMENTS)).results
    told = run_evaluation(Parts(), subject(model, TWO_DOCUMENTS, **changes)).results
    bpb = run_evaluation(BitsPerByte(), subject(model, TWO_DOCUMENTS, **changes))
    assert told["whole"] == bpb.results
    pairs = zip(plain["parts"], told["parts"], strict=True)
    assert all(one["loss_without"] != other["loss_without"] for one, other in pairs)


@pytest.mark.parametrize("source", ["bank", "bank_shared", "mixed_bank", "gated_additive"])
def test_tables_and_coefficients(source):
    model = layered(source)
    values = model.model.layers[1].attention.values
    outcome = run_evaluation(Parts(), subject(model))
    (part,) = (p for p in outcome.results["parts"] if p["part"] in ("bank", "table"))
    table = model.model.shared_table
    if source != "bank_shared":
        table = values.other.table if source == "mixed_bank" else values.table
    rms = table.square().mean().sqrt().item()
    assert part["table_rms"] == pytest.approx(rms)
    if source == "gated_additive":  # a gate has no one number
        assert (part["coefficient"], part["product"]) == (None, None)
    else:
        number = 0.5 if source == "mixed_bank" else values.scale.item()
        assert part["coefficient"] == pytest.approx(number)
        assert part["product"] == pytest.approx(number * rms)


def test_it_goes_on_where_it_was_stopped(tmp_path):
    model, log = layered("mixed_bank", SMALL), tmp_path / "records.jsonl"
    whole = run_evaluation(Parts(batch_size=2), subject(model), log)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:8]) + lines[8][:5])
    again = run_evaluation(Parts(batch_size=2), subject(model), log)
    assert again.results == whole.results
    assert len(lines) == 1 + 4 * (1 + 4)
    assert set(json.loads(lines[1])) == {"id", "prompt", "nats", "tokens", "bytes"}


@pytest.mark.parametrize("temperatures", ["learned", "none"])
def test_the_window_of_kvm_alone(temperatures):
    """One softmax over the exact tokens of aligned blocks, at the window's temperature."""
    sizes = Geometry(
        hidden_size=8, num_heads=4, num_kv_heads=2, key_dim=6, value_dim=5, rotary_dim=2
    )
    config = KVM(chunk_size=4, budget=Fixed(count=6), temperatures=temperatures)
    memory = config.build(sizes).double()
    if memory.window_temperature is not None:
        nn.init.uniform_(memory.window_temperature, 0.5, 2)
        nn.init.uniform_(memory.state_temperature, 0.5, 2)
    query, key = torch.randn(2, 4, 23, 6).double(), torch.randn(2, 2, 23, 6).double()
    value, x = torch.randn(2, 2, 23, 5).double(), torch.randn(2, 23, 8).double()
    window = WindowOfKVM(memory)
    output, _ = window(query, key, DenseValues(value), x, None, Span(0, 23))
    whole, _ = memory(query, key, DenseValues(value), x, None, Span(0, 23))
    assert torch.allclose(output[:, :, :8], whole[:, :, :8])
    assert not torch.allclose(output[:, :, 8:], whole[:, :, 8:], atol=1e-3)
    for token in range(23):
        seen = slice(max(0, (token // 4 - 1) * 4), token + 1)
        for head in range(4):
            scores = key[1, head // 2, seen] @ query[1, head, token] / 6**0.5
            if memory.window_temperature is not None:
                scores = scores * memory.window_temperature[head]
            expected = scores.softmax(0) @ value[1, head // 2, seen]
            assert torch.allclose(output[1, head, token], expected)
    first, state = window(
        query[:, :, :10], key[:, :, :10], DenseValues(value[:, :, :10]), x, None, Span(0, 10)
    )
    rest, _ = window(
        query[:, :, 10:], key[:, :, 10:], DenseValues(value[:, :, 10:]), x, state, Span(10, 13)
    )
    assert torch.allclose(torch.cat([first, rest], dim=2), output)


def test_wrong_subjects_and_settings():
    with pytest.raises(ValueError, match="small has no parts to leave out"):
        run_evaluation(Parts(), subject(layered("projection_plain")))
    with pytest.raises(ValueError, match="parts are known of meanbank models only, got Linear"):
        parts_of(nn.Linear(2, 2))
    bank = layered("bank")
    with pytest.raises(ValueError, match="small has no texts"):
        run_evaluation(Parts(), subject(bank, open_corpus=None))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Parts(batch_size=0)
