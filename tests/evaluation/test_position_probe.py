"""The linear probe of positions, on keys that tell them, on noise, and on small models."""

import math

import numpy as np
import pytest
import torch

from meanbank.data import RecallConfig, Stage, recall_batch
from meanbank.evaluation import PositionProbe, position_probe, run_evaluation
from meanbank.evaluation.linear_probe import explained, moments
from meanbank.evaluation.memory_statistics import PIECE
from meanbank.evaluation.position_probe import position_moments
from tests.conformance.models import KVM, make_model
from tests.evaluation.test_memory_statistics import inputs_of, model_of, subject

RECALL = RecallConfig(curriculum=(Stage(fraction=1.0, length=96, pairs=(6,)),))


def sample(seed, heads=2, count=300, width=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, count, width, generator=generator), torch.rand(
        count, 2, generator=generator
    )


def test_a_linear_function_is_read():
    """Head 0 carries the target in a direction that the others hide; head 1 carries nothing."""
    sums = []
    for seed in range(2):
        inputs, targets = sample(seed)
        inputs[0, :, 3] = 5 + 3 * targets[:, 0] - 2 * inputs[0, :, 1]
        sums.append(moments(inputs, targets))
    one, none = explained(*sums, range(6), -2).tolist()
    assert one > 0.95
    assert abs(none) < 0.1
    assert explained(*sums, range(6), -1).abs().max() < 0.1
    assert explained(*sums, range(2), -2).abs().max() < 0.1, "without the channel that has it"
    # of the variance of channel 3, 3 / 4 comes from the target and 4 from channel 1
    assert explained(*sums, range(3, 4), -2)[0] == pytest.approx(0.75 / 4.75, abs=0.05)


def test_against_least_squares_on_the_inputs_themselves(monkeypatch):
    monkeypatch.setattr("meanbank.evaluation.linear_probe.RIDGE", 0.0)
    (x, y), (other, wanted) = sample(0), sample(1)
    x[1] = x[1] * 3 - 7
    found = explained(moments(x, y), moments(other, wanted), range(1, 5), -1)
    for head in range(2):
        rows = np.c_[np.ones(300), x[head, :, 1:5].double()]
        weights = np.linalg.lstsq(rows, y[:, 1].double().numpy(), rcond=None)[0]
        guess = np.c_[np.ones(300), other[head, :, 1:5].double()] @ weights
        target = wanted[:, 1].double().numpy()
        r2 = 1 - ((guess - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()
        assert found[head].item() == pytest.approx(r2, abs=1e-9)


def test_sums_of_parts_are_those_of_the_whole():
    inputs, targets = sample(3)
    parts = sum(moments(inputs[:, at : at + 50], targets[at : at + 50]) for at in range(0, 300, 50))
    assert torch.allclose(parts, moments(inputs, targets), atol=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_inputs_that_do_not_vary_tell_nothing(value):
    (inputs, targets), (others, wanted) = sample(0), sample(1)
    inputs[..., :3] = others[..., :3] = value
    found = explained(moments(inputs, targets), moments(others, wanted), range(3), -1)
    assert found.abs().max() < 0.05


@pytest.mark.parametrize("changes", [{}, {"read_key": "raw"}, {"stored_rotary": "zeroed_again"}])
@torch.no_grad()
def test_which_keys_and_positions(changes):
    """Key by key, from what the layer's memory was given."""
    model, tokens = model_of({**KVM, **changes}), torch.randint(40, (45,))
    memory = model.model.layers[1].attention.memory
    keys = inputs_of(model, tokens)["key"][0, :, :40]  # 45 less what is in the window of 8
    rotary = memory.geometry.rotary_dim

    def norm(key):
        return torch.nn.functional.layer_norm(
            key, key.shape[-1:], memory.norm.weight, memory.norm.bias, 1e-5
        )

    keys = keys.clone()
    keys[..., :rotary] = 0
    keys = norm(keys)
    if changes.get("stored_rotary"):
        keys[..., :rotary] = 0
    if not changes.get("read_key"):
        keys = norm(keys)
    targets = torch.arange(40).double() / 44
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    expected = moments(keys, torch.stack([targets, targets[order]], dim=1))
    found = position_moments(model, {1: memory}, tokens, seed=5)
    assert list(found) == [1]
    assert torch.allclose(found[1], expected, rtol=1e-6)


def recall_subject(memory, **settings):
    model = make_model(
        "full", "projection", "grouped", torch.float32, layers=2, vocab_size=RECALL.vocab_size,
        plan=[{"memory": memory}], **settings,
    )  # fmt: skip
    return subject(model, open_corpus=None, recall=RECALL)


def test_keys_that_turn_with_position_tell_it_and_others_do_not():
    """All tokens alike: keys of the first layer differ by their rotation alone."""
    scores = {}
    for stored in ("kept", "zeroed"):
        of = recall_subject({**KVM, "stored_rotary": stored}, rope_theta=400.0)
        with torch.no_grad():
            embedding = of.model.model.embedding.weight
            embedding.copy_(embedding[:1].expand_as(embedding).clone())
        scores[stored] = run_evaluation(PositionProbe(count=8), of).scores
    names = {f"position-probe:{n}.{probe}" for n in range(2) for probe in position_probe.PROBES}
    assert set(scores["kept"]) == names
    for probe, expected in (("rotary", 1), ("read", 1)):
        assert scores["kept"][f"position-probe:0.{probe}"] == pytest.approx(expected, abs=0.02)
        assert scores["zeroed"][f"position-probe:0.{probe}"] == pytest.approx(0, abs=0.02)
    for found in scores.values():
        assert abs(found["position-probe:0.shuffled"]) < 0.1


def test_results_and_records(tmp_path):
    of = recall_subject({**KVM, "stored_rotary": "zeroed_again", "read_key": "raw"})
    log = tmp_path / "log.jsonl"
    whole = run_evaluation(PositionProbe(count=4), of, log)
    layer = whole.results["layers"][0]
    assert layer["layer"] == 0
    assert layer["rotary"] == pytest.approx(0, abs=1e-6), "they are zero"
    assert layer["read"] == pytest.approx(layer["content"], abs=0.01)
    assert (whole.results["documents"], whole.results["length"]) == (4, 96)
    sums = [
        position_moments(
            of.model, {0: of.model.model.layers[0].attention.memory}, ids.input_ids[0], seed=n
        )[0]
        for n in range(4)
        for ids in [
            recall_batch(torch.Generator().manual_seed(1_000_000 + n), 1, 96, 6, RECALL)
        ]
    ]  # fmt: skip
    expected = explained(sums[0] + sums[2], sums[1] + sums[3], range(8), -2).mean().item()
    assert layer["read"] == pytest.approx(expected, abs=1e-12)
    assert all(map(math.isfinite, whole.scores.values()))
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]))
    assert run_evaluation(PositionProbe(count=4), of, log) == whole


def test_without_rotary_channels_there_is_no_score_of_them():
    plan = [{"memory": KVM, "address": {"rotary_fraction": 0.0}}]
    model = make_model("full", "projection", "grouped", torch.float32, layers=2, plan=plan)
    documents = np.random.default_rng(0).integers(0, 40, (3, 30)).tolist()
    outcome = run_evaluation(PositionProbe(), subject(model, documents))
    assert outcome.results["documents"] == 3
    assert outcome.results["layers"][0]["rotary"] is None
    assert "position-probe:0.rotary" not in outcome.scores
    assert PIECE > 30


def test_wrong_subjects_and_settings():
    probe = PositionProbe()
    for memory in ("full", "ovq"):
        model = make_model(memory, "projection", "grouped", torch.float32, layers=2)
        with pytest.raises(ValueError, match="no layer of small is kvm"):
            run_evaluation(probe, subject(model))
    kvm = model_of(KVM)
    with pytest.raises(ValueError, match="nothing leaves a window of 8 tokens within 8 tokens"):
        run_evaluation(PositionProbe(sequence_length=8), subject(kvm))
    with pytest.raises(ValueError, match="a single held-out document has 20 tokens, and a probe"):
        run_evaluation(probe, subject(kvm, [[1] * 30, [2] * 5]))
    with pytest.raises(ValueError, match="count must be at least 2, got 1"):
        PositionProbe(count=1)
