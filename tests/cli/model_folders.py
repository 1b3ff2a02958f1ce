"""Folders of small models for tests of the command line."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def save_llama(folder: Path, corpus: Path) -> Path:
    """A model of 60 tokens' context with a begin-of-text token, saved as Hugging Face does."""
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    tokenizer = train_tokenizer(texts, 300)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=60, bos_token_id=5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
