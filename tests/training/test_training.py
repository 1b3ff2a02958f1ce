"""The training loop: bit-exact resume, stops, refusals, and what is left on disk."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from meanbank.data import Batch
from meanbank.training import Interrupted, NonFiniteError, load_config, load_run, train
from meanbank.training import trainer as trainer_module
from meanbank.training.checkpoint import checkpoints
from meanbank.training.metrics import read_metrics
from meanbank.training.run import read_config as load_run_config


def losses(run):
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def test_a_run_leaves_everything_needed(config_file, tmp_path):
    run = train(load_config(config_file), tmp_path / "run")
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["tokens"] == 6 * 2 * 32
    assert [line["step"] for line in lines if "held_out_bpb" in line] == [3, 6]
    assert [path.name for path in checkpoints(run)] == ["step-000002", "step-000004", "step-000006"]
    info = json.loads((run / "run.json").read_text())
    assert info["seed"] == 0
    assert info["data"]["fingerprint"]
    loaded = load_run(run)
    assert loaded.step == 6
    assert info["parameters"] == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the memory").ids) == "the memory"
    assert load_config(run / "config.yaml") == load_config(config_file)
    assert not list(run.rglob("*.tmp"))


def figures(run):
    """Every line of the metrics without what the clock decides."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def stop_after(monkeypatch, step):
    """Have a signal come in the middle of the next step, so that a run stops after it."""
    train_step = trainer_module.Trainer._train_step

    def signalled(self, batches):
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return train_step(self, batches)

    monkeypatch.setattr(trainer_module.Trainer, "_train_step", signalled)


BOV = ["training.recipe=bov"]  # two optimizers
SPARSE = ["training.recipe.table_gradients=sparse"]  # one more
CLIPPED = ["training.recipe.clip=0.1"]


@pytest.mark.parametrize(
    ("stopped_after", "overrides"),
    [  # 3 is evaluated, too
        (2, []),
        (3, []),
        (2, BOV),
        (3, [*BOV, "model.backbone=nanochat"]),
        (2, [*SPARSE, *CLIPPED]),
        (3, [*BOV, *SPARSE]),
    ],
)
def test_resuming_is_bit_exact(config_file, tmp_path, stopped_after, overrides, monkeypatch):
    config = load_config(config_file, overrides)
    whole = train(config, tmp_path / "whole")
    run = tmp_path / "parts"
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        stop_after(patched, stopped_after)
        train(config, run)
    torch.randn(7)  # the random state of the process has moved on
    train(config, run, resume=True)
    assert figures(run) == figures(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours = load_file(run / "checkpoints" / "step-000006" / name)
        theirs = load_file(whole / "checkpoints" / "step-000006" / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), key


def test_steps_after_the_last_checkpoint_are_done_again(config_file, tmp_path):
    config = load_config(config_file)
    whole = train(config, tmp_path / "whole")
    expected = losses(whole)
    shutil.rmtree(whole / "checkpoints" / "step-000006")  # as if killed after step 5
    with (whole / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    train(config, whole, resume=True)
    assert losses(whole) == expected


def test_old_checkpoints_are_pruned(config_file, tmp_path):
    run = train(load_config(config_file, ["training.keep_last=1"]), tmp_path / "run")
    assert [path.name for path in checkpoints(run)] == ["step-000006"]


def test_the_seed_and_nothing_else_changes_a_run(config_file, tmp_path):
    config = load_config(config_file)
    first, again = train(config, tmp_path / "a"), train(config, tmp_path / "b")
    assert losses(first) == losses(again)
    other = train(load_config(config_file, ["training.seed=1"]), tmp_path / "c")
    assert losses(other) != losses(first)


def test_an_existing_folder_is_never_clobbered(config_file, tmp_path):
    config = load_config(config_file, ["training.steps=2"])
    run = train(config, tmp_path / "run")
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="exists already"):
        train(config, run)
    assert (run / "metrics.jsonl").read_text() == before
    train(config, run, force=True)
    assert len(losses(run)) == 2
    other = tmp_path / "notes"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not a run folder"):
        train(config, other, force=True)
    with pytest.raises(ValueError, match="not a run folder"):
        train(config, tmp_path / "nowhere", resume=True)
    with pytest.raises(ValueError, match=r"training\.seed = 0, not 5"):
        train(load_config(config_file, ["training.steps=2", "training.seed=5"]), run, resume=True)
    assert (other / "thesis.txt").read_text() == "precious"


def test_too_little_held_out_text_leaves_no_run(config_file, tmp_path):
    config = load_config(config_file, ["data.sequence_length=3000", "data.held_out_fraction=0.05"])
    with pytest.raises(ValueError, match="held-out split has"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_not_a_run(config_file, tmp_path):
    run = train(load_config(config_file), tmp_path / "run")
    with pytest.raises(ValueError, match=f"is a checkpoint; give its run, {run}"):
        load_run(checkpoints(run)[-1])


def test_changed_data_is_not_resumed(config_file, tmp_path, corpus):
    config = load_config(config_file)
    run = train(config, tmp_path / "run")
    (corpus / "more.txt").write_text("one more document")
    before = (run / "run.json").read_text()
    with pytest.raises(ValueError, match="has changed since it was started"):
        train(config, run, resume=True)
    assert (run / "run.json").read_text() == before


def test_damaged_runs_are_one_clear_line(config_file, tmp_path):
    run = train(load_config(config_file, ["training.keep_last=1"]), tmp_path / "run")
    info = (run / "run.json").read_text()
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the description of a run"):
        load_run(run)
    (run / "run.json").write_text(info)
    weights = run / "checkpoints" / "step-000006" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    for load in (lambda: load_run(run), lambda: train(load_run_config(run), run, resume=True)):
        with pytest.raises(ValueError, match="is damaged") as error:
            load()
        assert "\n" not in str(error.value)
    weights.write_bytes(whole)
    optimizer = weights.with_name("optimizer.safetensors")
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        train(load_run_config(run), run, resume=True)


def test_wrong_data_leaves_an_earlier_run_alone(config_file, tmp_path):
    run = train(load_config(config_file, ["training.steps=2"]), tmp_path / "run")
    broken = load_config(config_file, [f"data.source=files:{tmp_path}/nothing/*.txt"])
    with pytest.raises(ValueError, match="nothing"):
        train(broken, run, force=True)
    assert len(losses(run)) == 2


def test_a_non_finite_loss_stops_before_the_update(config_file, tmp_path, monkeypatch):
    saved = {}
    train_step = trainer_module.Trainer._train_step

    def poison(self, batches):
        if self.step == 3:
            with torch.no_grad():
                self.model.model.layers[1].mlp.up.weight[0, 0] = float("nan")
            saved.update({n: p.clone() for n, p in self.model.named_parameters()})
            saved["model"] = self.model
        return train_step(self, batches)

    monkeypatch.setattr(trainer_module.Trainer, "_train_step", poison)
    with pytest.raises(NonFiniteError, match=r"step 4, first in model\.layers\.1\.mlp\.up"):
        train(load_config(config_file), tmp_path / "run")
    model = saved.pop("model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), saved[name].nan_to_num()), name


def test_a_non_finite_gradient_stops_too(config_file, tmp_path, monkeypatch):
    def loss_of(model, batch, targets, positions=None):
        weight = model.model.norm.weight
        return (weight - weight.detach()).abs().sum().sqrt() + 1  # 1, with an infinite slope

    monkeypatch.setattr(trainer_module, "language_loss", loss_of)
    with pytest.raises(NonFiniteError, match="gradient is not finite at step 1"):
        train(load_config(config_file), tmp_path / "run")


def steps_of(run) -> int:
    return len(losses(run)) if (run / "metrics.jsonl").is_file() else 0


def test_a_model_that_is_not_finite_is_not_saved(config_file, tmp_path):
    overrides = ["training.steps=1", "training.warmup_steps=0", "training.recipe=plain"]
    huge = [*overrides, "training.recipe.learning_rate=1e37"]
    with pytest.raises(NonFiniteError, match="after step 1"):
        train(load_config(config_file, huge), tmp_path / "run")
    assert not checkpoints(tmp_path / "run")


def test_signals_save_and_stop(config_file, tmp_path):
    command = [sys.executable, "-m", "meanbank", "train", str(config_file)]
    command += ["--set", "training.steps=100000", "--set", "training.checkpoint_every=0"]
    command += ["--set", "training.evaluate_every=0", "--out", str(tmp_path / "run")]
    for resume in ([], ["--resume"]):
        process = subprocess.Popen(command + resume, stderr=subprocess.PIPE, text=True)
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        seen = steps_of(tmp_path / "run")
        while process.poll() is None and steps_of(tmp_path / "run") <= seen + 1:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT if resume else signal.SIGTERM)
        _, errors = process.communicate()
        watchdog.cancel()
        assert process.returncode == (130 if resume else 143), errors
        assert "Traceback" not in errors
        step = len(losses(tmp_path / "run"))
        assert checkpoints(tmp_path / "run")[-1].name == f"step-{step:06d}"
        assert step > seen


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.recipe={type: plain, learning_rate: 1e-2}"],
        ["training.recipe=bov", "model.backbone=nanochat"],
    ],
)
def test_training_learns(config_file, tmp_path, overrides):
    config = load_config(config_file, ["training.steps=60", *overrides])
    run = train(config, tmp_path / "run")
    found = losses(run)
    assert sum(found[-5:]) / 5 < 0.75 * sum(found[:5]) / 5


def test_isolated_documents_are_trained_and_evaluated_apart(config_file, tmp_path):
    """Other losses than in a stream; the same once every document fills its window alone."""
    stream = train(load_config(config_file), tmp_path / "stream")
    apart = train(load_config(config_file, ["data.pack=isolate"]), tmp_path / "apart")
    assert figures(stream) != figures(apart)
    batch = Batch(input_ids=torch.randint(1, 30, (2, 32)), labels=torch.randint(1, 30, (2, 32)))
    model = load_run(apart).model
    whole = trainer_module.language_loss(model, batch, 64)
    one_each = dataclasses.replace(batch, document_ids=torch.zeros(2, 32, dtype=torch.long))
    assert torch.equal(trainer_module.language_loss(model, one_each, 64), whole)
    halves = torch.arange(32).div(16, rounding_mode="floor").expand(2, 32)
    parts = [
        dataclasses.replace(batch, input_ids=batch.input_ids[:, p], labels=batch.labels[:, p])
        for p in (slice(0, 16), slice(16, 32))
    ]
    separately = sum(trainer_module.language_loss(model, part, 64) for part in parts)
    apart = dataclasses.replace(batch, document_ids=halves)
    packed = trainer_module.language_loss(model, apart, 64)
    assert abs(packed - separately) <= 1e-5
