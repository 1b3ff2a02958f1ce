"""Resuming: from any step, with any number of parts and workers, to the same bits."""

import json
import signal

import pytest
import torch

from meanbank.data import Batch
from meanbank.model import MeanbankForCausalLM
from meanbank.training import Interrupted, load_config, train
from meanbank.training import trainer as trainer_module
from meanbank.training.checkpoint import MANIFEST, checkpoints, step_of
from meanbank.training.gradients import numbers_of
from meanbank.training.metrics import read_metrics
from meanbank.training.run import open_data
from tests.training.faults import write_config

EPOCHS, STEPS = 3, 8


def figures(run):
    """Every line of the metrics without what the clock decides."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def files_at(run):
    """Size and sha256 of every file of every checkpoint."""
    return {
        step_of(path): json.loads((path / MANIFEST).read_text())["files"]
        for path in checkpoints(run)
    }


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A run of three epochs in eight steps, each of 30 rows in three parts, saved every step."""
    monkeypatch.setenv("MEANBANK_CACHE", str(tmp_path / "cache"))
    path = write_config(tmp_path)

    def load(*overrides):
        settings = [f"training.steps={STEPS}", "training.checkpoint_every=1", "data.batch_size=30"]
        settings += ["data.sequence_length=24", "training.keep_last=99"]
        settings += ["training.accumulation=3", "training.recipe=bov"]
        return load_config(path, [*settings, *overrides])

    return load


def test_resuming_at_every_step_is_bit_exact(tiny, tmp_path, monkeypatch):
    config = tiny()
    batches = open_data(config).batches
    assert EPOCHS <= STEPS * 30 / batches.windows[0].per_epoch < EPOCHS + 1
    whole = train(config, tmp_path / "whole")
    parts = tmp_path / "parts"
    train_step = trainer_module.Trainer._train_step

    def one_step(self, batches):  # and then a signal
        signal.raise_signal(signal.SIGTERM)
        return train_step(self, batches)

    with monkeypatch.context() as patched:
        patched.setattr(trainer_module.Trainer, "_train_step", one_step)
        for step in range(STEPS - 1):
            torch.randn(step)  # the random state of the process moves on
            workers = 2 * (step % 2)
            with pytest.raises(Interrupted, match=f"after step {step + 1}"):
                train(tiny(f"data.workers={workers}"), parts, resume=step > 0)
    train(tiny("data.workers=2"), parts, resume=True)
    assert figures(parts) == figures(whole)
    found = files_at(parts)
    assert list(found) == list(range(1, STEPS + 1))
    assert found == files_at(whole)


def test_workers_change_nothing(tiny, tmp_path):
    settings = ["training.accumulation=1", "training.steps=4"]
    alone = train(tiny(*settings), tmp_path / "alone")
    ahead = train(tiny(*settings, "data.workers=2"), tmp_path / "ahead")
    assert figures(alone) == figures(ahead)
    assert files_at(alone) == files_at(ahead)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_of_a_batch_give_the_gradient_of_the_whole(tiny, parts):
    """In float64, with as many targets in each row as chance gives, and rows without any."""
    config = tiny()
    torch.manual_seed(0)
    model = MeanbankForCausalLM(config.model_config(40)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids, labels = torch.randint(40, (2, 5, 8))
    labels[torch.rand(5, 8) < 0.4] = -100
    labels[0] = -100
    batch = Batch(input_ids=ids, labels=labels)
    logits = model(input_ids=ids, use_cache=False).logits
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    found = []
    for pieces in (1, parts):
        model.zero_grad()
        losses = []
        for part in batch.parts(pieces):
            losses.append(trainer_module.language_loss(model, part, batch.targets))
            losses[-1].backward()
        assert abs(sum(losses) - mean) <= 1e-14
        gradients = numbers_of(model)
        assert len(gradients) > 20
        found.append({name: gradient.clone() for name, gradient in gradients.items()})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() <= 1e-14, name


def test_parts_change_a_run_by_rounding_only(tiny, tmp_path):
    one = train(tiny("training.accumulation=1", "training.steps=3"), tmp_path / "one")
    many = train(tiny("training.accumulation=30", "training.steps=3"), tmp_path / "many")
    for line, other in zip(figures(one), figures(many), strict=True):
        assert line.keys() == other.keys()
        assert line == pytest.approx(other, rel=1e-3)


def test_more_parts_than_rows_are_refused(tiny):
    with pytest.raises(ValueError, match="accumulation is 31, but a batch has only 30 rows"):
        tiny("training.accumulation=31")


def test_what_may_change_on_resuming(tiny, tmp_path):
    run = train(tiny("training.keep_last=1", "training.steps=3"), tmp_path / "run")
    refused = tiny("training.steps=3", "training.seed=4", "data.sequence_length=9")
    with pytest.raises(ValueError, match="cannot resume") as error:
        train(refused, run, resume=True)
    assert "data.sequence_length = 24, not 9, training.seed = 0, not 4" in str(error.value)
    changes = ["training.checkpoint_every=7", "training.keep_last=5", "training.keep_every=3"]
    changes += ["training.evaluate_every=3", "training.evaluation_tokens=8", "data.workers=1"]
    changes += ["training.accumulation=2", "training.device=cpu"]
    changes += ["training.write_behind=4"]
    changed = tiny("training.steps=3", *changes)
    train(changed, run, resume=True)
    assert load_config(run / "config.yaml") == changed


def test_an_evaluation_that_a_signal_ends_is_done_on_resuming(tiny, tmp_path, monkeypatch):
    settings = ["training.evaluate_every=2", "training.steps=4", "training.checkpoint_every=9"]
    whole = train(tiny(*settings), tmp_path / "whole")
    assert [line["step"] for line in figures(whole) if "held_out_bpb" in line] == [2, 4]
    run_evaluation = trainer_module.run_evaluation
    signals = []

    def signalled(evaluation, subject):
        if signals.pop():
            signal.raise_signal(signal.SIGINT)
        return run_evaluation(evaluation, subject)

    monkeypatch.setattr(trainer_module, "run_evaluation", signalled)
    run = tmp_path / "run"
    for step, comes in ((2, [True]), (4, [True, False])):  # the second begins with that of step 2
        signals += comes
        with pytest.raises(Interrupted, match=f"SIGINT after step {step}"):
            train(tiny(*settings), run, resume=step > 2)
        assert not signals
        assert step_of(checkpoints(run)[-1]) == step
        assert "held_out_bpb" not in figures(run)[-1]
    signals += [False]
    train(tiny(*settings), run, resume=True)
    assert figures(run) == figures(whole)
