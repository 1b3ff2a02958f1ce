"""The Hugging Face Trainer on our model: gradients, accumulation, checkpointing, the example."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from meanbank import MeanbankConfig, MeanbankForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face_trainer.py"
PLAN = [
    {"memory": {"type": "kvm", "chunk_size": 4, "budget": {"type": "power_law", "factor": 2}}},
    {"where": "last_third", "values": {"type": "bank"}},
]
RATE = 0.5


@pytest.fixture(autouse=True)
def needed(monkeypatch):
    pytest.importorskip("accelerate", reason="pip install 'meanbank[accelerate]'")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert "WORLD_SIZE" not in os.environ


def make_model():
    torch.manual_seed(3)
    config = MeanbankConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, plan=PLAN
    )
    model = MeanbankForCausalLM(config)
    with torch.no_grad():  # so that every parameter has a gradient
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_rows():
    """Four rows, of which 23, 20, 11 and 2 tokens are targets."""
    ids = torch.randint(20, (4, 24), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    for row, ignored in enumerate((0, 4, 13, 22)):
        labels[row, :ignored] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def expected_gradients(model, rows):
    """Of the mean cross-entropy of all targets, without anything of Hugging Face's."""
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    logits = model(ids, use_cache=False).logits[:, :-1]
    targets = labels[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    wanted = targets.flatten() != -100
    assert wanted.sum() == 23 + 20 + 11 + 2
    loss = losses[wanted].sum() / wanted.sum()
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("checkpointing", ["kept", "recomputed"])
@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_a_step_is_that_of_the_whole_batch(tmp_path, batch, accumulation, checkpointing):
    model, rows = make_model(), make_rows()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss, gradients = expected_gradients(model, rows)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing == "recomputed",
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=RATE,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert model.model.gradient_checkpointing == (checkpointing == "recomputed")
    for old, gradient, parameter in zip(before, gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter, old - RATE * gradient, rtol=1e-4, atol=1e-6)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, abs=1e-4)
    after, _ = expected_gradients(model, rows)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize("options", [[], ["--activation-checkpointing"]])
def test_the_example(tmp_path, options, capsys):
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main(["--out", str(tmp_path), "--steps", "12", *options])
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert "    def " in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [plan.values.tag for plan in model.config.plans()] == ["projection", "bank"]
