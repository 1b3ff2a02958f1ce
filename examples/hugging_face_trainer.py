"""Train with the Hugging Face Trainer: a Key-Value Means memory, and a bank of values.

    python examples/hugging_face_trainer.py --out runs/trainer

Trains on a page of Python a byte at a time, saves the model, loads it again and lets it write.
Needs accelerate (pip install 'meanbank[accelerate]'); takes half a minute on one core.
"""

import argparse
import textwrap
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from meanbank import MeanbankConfig, MeanbankForCausalLM

LENGTH = 128  # tokens a row


def make_model() -> MeanbankForCausalLM:
    """Two layers that remember 2·√N rows beyond their window; the last one has a bank of values."""
    memory = {"type": "kvm", "chunk_size": 16, "budget": {"type": "power_law", "factor": 2}}
    config = MeanbankConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        plan=[{"memory": memory}, {"where": "last_third", "values": {"type": "bank"}}],
    )
    return MeanbankForCausalLM(config)


def make_rows() -> list[dict[str, torch.Tensor]]:
    """Rows of `LENGTH` bytes of a module of Python's; the model shifts the labels itself."""
    text = Path(textwrap.__file__).read_bytes()
    rows = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main(arguments: list[str] | None = None) -> list[float]:
    """Run the example; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--activation-checkpointing", action="store_true")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = make_model()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,  # the gradient is that of one batch of eight
            learning_rate=3e-3,
            activation_checkpointing=options.activation_checkpointing,
            logging_steps=1 if options.steps < 20 else 10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=make_rows(),
    )
    trainer.train()
    model.save_pretrained(options.out)

    loaded = AutoModelForCausalLM.from_pretrained(options.out)
    prompt = torch.tensor([list(b"    def ")])
    written = loaded.generate(prompt, max_new_tokens=100, do_sample=True, temperature=0.7)
    print(bytes(written[0].tolist()).decode("utf-8", errors="replace"))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
