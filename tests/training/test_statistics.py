"""Statistics of memories in training, which they do not touch."""

import math
import signal

import numpy as np
import pytest
import torch

from meanbank.data import recall_batch
from meanbank.evaluation.memory_statistics import layer_statistics
from meanbank.training import Interrupted, load_config, load_run, train
from meanbank.training import trainer as trainer_module
from meanbank.training.metrics import last_tokens, read_metrics
from meanbank.training.parallel import OneProcess
from meanbank.training.run import open_data, subject_of
from meanbank.training.statistics import StatisticsLog, model_statistics
from tests.conformance.models import make_model
from tests.training.test_resume import figures, files_at

EVERY = "training.memory_statistics_every=2"


def test_a_run_logs_them_and_learns_the_same(config_file, tmp_path):
    plain = train(load_config(config_file), tmp_path / "plain")
    assert not (plain / "statistics.jsonl").exists()
    logged = train(load_config(config_file, [EVERY]), tmp_path / "logged")
    assert files_at(logged) == files_at(plain)  # weights and moments
    assert figures(logged) == figures(plain)  # and the order of batches
    lines = read_metrics(logged / "statistics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert last_tokens(logged / "metrics.jsonl") == 6 * 64
    found = load_run(logged)
    held_out = found.corpus().held_out
    tokens = torch.from_numpy(held_out.document(0)[:32].astype(np.int64))
    assert held_out.lengths[0] >= 32
    last = lines[-1]
    assert (last["tokens"], [layer["layer"] for layer in last["layers"]]) == (32, [0, 1])
    for layer, told in zip(last["layers"], layer_statistics(found.model, tokens), strict=True):
        assert layer["rows"] > 0
        assert {name: layer[name] for name in told} == pytest.approx(told)
        memory = found.model.model.layers[layer["layer"]].attention.memory
        assert layer["temperatures"] == {
            "state": memory.state_temperature.tolist(), "window": memory.window_temperature.tolist()
        }  # fmt: skip
    values = found.model.model.layers[1].attention.values
    rms = math.sqrt(values.table.detach().double().square().mean())
    assert last["layers"][1]["coefficients"] == {"bank": pytest.approx(values.scale.item())}
    assert last["layers"][1]["products"] == {"bank": pytest.approx(values.scale.item() * rms)}
    assert "products" not in last["layers"][0]


def test_no_random_number_is_drawn_and_the_mode_stays():
    model = make_model("kvm_power_law", "bank", "grouped", torch.float32, layers=1).train()
    before = torch.random.get_rng_state()
    assert model_statistics(model, torch.arange(30))[0]["rows"] > 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_without_compressed_rows():
    plan = [{"memory": "full"}, {"where": [1], "values": {"type": "bank", "scale": "learned"}}]
    model = make_model("full", "projection", "grouped", torch.float32, layers=2, plan=plan)
    values = model.model.layers[1].attention.values
    torch.nn.init.constant_(values.scale, 0.5)
    torch.nn.init.constant_(values.table, -3.0)
    assert model_statistics(model, torch.arange(9)) == [
        {"layer": 1, "coefficients": {"bank": 0.5}, "products": {"bank": 1.5}}
    ]


def test_an_interrupted_run_has_the_same_lines(config_file, tmp_path, monkeypatch):
    config = load_config(config_file, [EVERY, "training.checkpoint_every=1"])
    whole = train(config, tmp_path / "whole")
    train_step, run = trainer_module.Trainer._train_step, tmp_path / "run"

    def step_and_stop(self, batches):
        if self.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return train_step(self, batches)

    with monkeypatch.context() as patched:
        patched.setattr(trainer_module.Trainer, "_train_step", step_and_stop)
        with pytest.raises(Interrupted, match="after step 4"):
            train(config, run)
    with (run / "statistics.jsonl").open("a") as file:  # a try that went further, and was killed
        file.write('{"step": 6, "layers": []}\n{"step": 8, "la')
    train(config, run, resume=True)
    assert (run / "statistics.jsonl").read_text() == (whole / "statistics.jsonl").read_text()


def test_the_document_is_fixed(config_file):
    """The first that is long enough, or the longest; for recall, the first that tells numbers."""
    config = load_config(config_file, ["data.sequence_length=64"])
    data = open_data(config)
    assert data.corpus is not None
    model = make_model("kvm_power_law", "projection", "grouped", torch.float32, layers=1)
    held_out = data.corpus.held_out
    longest = int(held_out.lengths.argmax())
    cases = {64: int(held_out.documents_at_least(64)[0]), 10**6: longest}
    for length, number in cases.items():
        subject = subject_of(config, model, data.corpus)
        object.__setattr__(subject, "training_length", length)
        log = StatisticsLog(subject, OneProcess(model))
        assert log.tokens.tolist() == held_out.document(number)[:length].tolist()
    recall = load_config("quick/recall_full").data.recall
    assert recall is not None
    subject = subject_of(load_config("quick/recall_full"), model, None)
    stage = recall.curriculum[-1]
    generator = torch.Generator().manual_seed(1_000_000)
    expected = recall_batch(generator, 1, stage.length, stage.pairs[-1], recall).input_ids[0]
    tokens = StatisticsLog(subject, OneProcess(model)).tokens
    assert torch.equal(tokens, expected)
