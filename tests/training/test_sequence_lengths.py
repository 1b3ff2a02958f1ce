"""Runs whose rows are short at first: what they cost, how they resume, what is left."""

import fcntl
import json
import signal

import pytest

from meanbank.training import Interrupted, load_config, train
from meanbank.training import trainer as trainer_module
from meanbank.training.metrics import read_metrics
from meanbank.training.overview import state_of
from meanbank.training.planning import (
    batch_shape,
    flops_per_token,
    model_of,
    plan_run,
    training_flops,
    training_tokens,
)
from meanbank.training.run import open_data
from tests.cli.test_cli import run
from tests.training.test_resume import figures, files_at

STAGES = "data.sequence_lengths=[{fraction: 0.5, length: 8}, {fraction: 0.5, length: 32}]"


def test_a_plan_counts_each_stage_at_its_length(config_file, capsys):
    config, plain = load_config(config_file, [STAGES]), load_config(config_file)
    assert batch_shape(config) == batch_shape(plain) == (32, 64)
    assert training_tokens(config) == training_tokens(plain) == 6 * 64
    model = model_of(config)
    short, long = (
        sum(part.total for part in flops_per_token(model, length, "exact").values())
        for length in (8, 32)
    )
    assert short < long
    assert training_flops(model, config) == 3 * 64 * short + 3 * 64 * long
    plan = plan_run(config, tokens=64 * 10)
    assert [(of.steps, of.rows, of.length) for of in plan.stages] == [(5, 8, 8), (5, 2, 32)]
    assert plan.training_flops == 5 * 64 * short + 5 * 64 * long
    assert run("plan", str(config_file), "--set", STAGES) == 0
    rows = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    assert ["3", "8", "8"] in rows
    assert ["6", "2", "32"] in rows


def test_a_run_resumes_in_any_stage(config_file, tmp_path, monkeypatch):
    settings = [STAGES, "training.checkpoint_every=1", "training.accumulation=2"]
    config = load_config(config_file, settings)
    whole = train(config, tmp_path / "whole")
    shapes, language_loss = [], trainer_module.language_loss

    def loss(model, batch, *more):
        shapes.append(tuple(batch.input_ids.shape))
        return language_loss(model, batch, *more)

    monkeypatch.setattr(trainer_module, "language_loss", loss)
    train_step, parts = trainer_module.Trainer._train_step, tmp_path / "parts"

    def one_step(self, batches):  # and then a signal
        signal.raise_signal(signal.SIGTERM)
        return train_step(self, batches)

    with monkeypatch.context() as patched:
        patched.setattr(trainer_module.Trainer, "_train_step", one_step)
        for step in range(4):
            with pytest.raises(Interrupted):
                train(config, parts, resume=step > 0)
    train(load_config(config_file, [*settings, "data.workers=2"]), parts, resume=True)
    assert shapes == 6 * [(4, 8)] + 6 * [(1, 32)]  # two parts of a step
    assert figures(parts) == figures(whole)
    assert files_at(parts) == files_at(whole)
    assert [line["tokens"] for line in read_metrics(whole / "metrics.jsonl") if "loss" in line] == [
        64 * step for step in range(1, 7)
    ]
    with pytest.raises(ValueError, match=r"cannot resume .* data\.sequence_lengths"):
        train(load_config(config_file, settings[1:]), parts, resume=True)


def test_what_is_left_of_a_run(config_file, tmp_path):
    """Steps have equal tokens in every stage, so the time left is that of the steps left."""
    path = train(load_config(config_file, [STAGES]), tmp_path / "run")
    lines = [line for line in read_metrics(path / "metrics.jsonl") if "loss" in line][:2]
    for line in lines:
        line |= {"seconds": 2.5 * line["step"]}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = state_of(path)
    assert (state.step, state.steps, state.tokens, state.seconds_left) == (2, 6, 128, 10.0)


def test_idle_memories_are_told_by_the_longest_rows(config_file, capsys):
    """8 tokens stay in the window of 3 chunks of 4; 32 do not."""
    for settings, warned in (([STAGES], False), (["data.sequence_length=8"], True)):
        config = load_config(config_file, settings)
        data = open_data(config)
        capsys.readouterr()
        model = trainer_module.MeanbankForCausalLM(config.model_config(data.vocab_size))
        trainer_module.warn_of_idle_memories(model, config)
        assert ("compressed memory is never used" in capsys.readouterr().err) == warned
