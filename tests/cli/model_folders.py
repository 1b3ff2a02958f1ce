"""Folders of small models for tests of the command line."""

from pathlib import Path

import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.data.tokenizer import train_tokenizer
from tests.conftest import WORDS


def save_model(folder: Path, plan: list) -> str:
    """A plain Hugging Face folder: two small layers, and a tokenizer of `WORDS`."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([" ".join(WORDS)], 300)
    model = MeanbankForCausalLM(
        MeanbankConfig(
            vocab_size=300,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initialization="plain",
            plan=plan,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
