"""A NaN in weights, in the loss or in a gradient stops a run before the update."""

import pytest
import torch
from safetensors.torch import load_file

from meanbank.training import NonFiniteError, load_config, train
from meanbank.training import trainer as trainer_module
from meanbank.training.checkpoint import checkpoints, step_of
from meanbank.training.claim import status_of

NAN = float("nan")


def train_with(monkeypatch, config, run, plant):
    """Train; `plant(trainer)` comes before step 4, the last checkpoint was after step 2."""
    train_step = trainer_module.Trainer._train_step
    seen = {}

    def planted(self, batches):
        if self.step == 3:
            plant(self)
            seen["model"] = self.model
            seen["before"] = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        return train_step(self, batches)

    with monkeypatch.context() as patched, pytest.raises(NonFiniteError) as error:
        patched.setattr(trainer_module.Trainer, "_train_step", planted)
        train(config, run)
    for name, parameter in seen["model"].named_parameters():  # there was no update
        assert torch.equal(parameter.nan_to_num(), seen["before"][name].nan_to_num()), name
    assert "\n" not in str(error.value)
    assert status_of(run) == ("failed", str(error.value))
    return str(error.value)


def assert_clean(run):
    last = checkpoints(run)[-1]
    assert step_of(last) == 2
    for name in ("model", "optimizer"):
        for tensor in load_file(last / f"{name}.safetensors").values():
            assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("weight", "place"),
    [
        ("model.embedding.weight", "model.embedding"),
        ("model.layers.1.mlp.up.weight", "model.layers.1.mlp.up"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_in_a_weight(config_file, tmp_path, monkeypatch, weight, place, accumulation):
    def plant(trainer):
        with torch.no_grad():
            trainer.model.get_parameter(weight).fill_(NAN)

    config = load_config(config_file, [f"training.accumulation={accumulation}"])
    told = train_with(monkeypatch, config, tmp_path / "run", plant)
    assert told == f"the loss is nan at step 4, first in {place}"
    assert_clean(tmp_path / "run")


def test_in_the_loss_of_one_part(config_file, tmp_path, monkeypatch):
    loss_of, parts = trainer_module.language_loss, []

    def plant(trainer):
        def poisoned(model, batch, targets, positions=None):
            parts.append(batch)
            return loss_of(model, batch, targets) * (NAN if len(parts) > 1 else 1.0)

        monkeypatch.setattr(trainer_module, "language_loss", poisoned)

    config = load_config(config_file, ["training.accumulation=2"])
    told = train_with(monkeypatch, config, tmp_path / "run", plant)
    assert told == "the loss is nan at step 4, first in the loss itself"
    assert len(parts) == 3  # the second one again, to find the place
    assert_clean(tmp_path / "run")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_in_a_gradient(config_file, tmp_path, monkeypatch, accumulation):
    name = "model.layers.0.mlp.down.weight"

    def plant(trainer):
        trainer.model.get_parameter(name).register_hook(lambda gradient: gradient * NAN)

    config = load_config(config_file, [f"training.accumulation={accumulation}"])
    told = train_with(monkeypatch, config, tmp_path / "run", plant)
    assert told == f"a gradient is not finite at step 4, first in {name}"
    assert_clean(tmp_path / "run")
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "run", resume=True)
    last = [checkpoints(tmp_path / name)[-1] / "model.safetensors" for name in ("run", "whole")]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert whole.is_dir()


def test_in_a_weight_that_no_batch_reads(config_file, tmp_path, monkeypatch):
    """Nobody notices until it would be saved."""
    train_step = trainer_module.Trainer._train_step

    def planted(self, batches):
        figures = train_step(self, batches)
        if self.step == 4:
            with torch.no_grad():
                self.model.get_parameter("model.layers.1.attention.values.table")[-1] = NAN
        return figures

    monkeypatch.setattr(trainer_module.Trainer, "_train_step", planted)
    with pytest.raises(NonFiniteError, match=r"layers\.1.*table is not finite after step 4; not"):
        train(load_config(config_file), tmp_path / "run")
    assert_clean(tmp_path / "run")
