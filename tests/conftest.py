"""Settings and fixtures for all tests."""

import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
import yaml
from hypothesis import settings as hypothesis_settings

from meanbank.training import load_config, train

# A busy machine is no failure, and a run must repeat.
hypothesis_settings.register_profile("meanbank", deadline=None, derandomize=True, max_examples=30)
hypothesis_settings.load_profile("meanbank")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run what is marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--runslow"):
        config.option.markexpr = ""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before."""
    torch.manual_seed(0)


WORDS = ["the", "memory", "keeps", "a", "mean", "of", "keys", "values", "and", "tokens"]


def write_corpus(folder: Path) -> Path:
    """Twenty text files of 200 to 390 words."""
    folder.mkdir()
    generator = random.Random(0)
    for number in range(20):
        words = generator.choices(WORDS, k=200 + 10 * number)
        (folder / f"{number:02}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def write_config(path: Path, corpus: Path) -> Path:
    """KVM with a bank in the last layer, 6 steps."""
    settings = {
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "plan": [
                {
                    "memory": {
                        "type": "kvm",
                        "chunk_size": 4,
                        "budget": {"type": "power_law", "factor": 2},
                    }
                },
                {"where": "last_third", "values": "bank"},
            ],
        },
        "data": {
            "source": f"files:{corpus}/*.txt",
            "vocab_size": 300,
            "sequence_length": 32,
            "batch_size": 2,
        },
        "training": {
            "recipe": "kvm",
            "steps": 6,
            "warmup_steps": 2,
            "evaluate_every": 3,
            "evaluation_tokens": 256,
            "checkpoint_every": 2,
            "keep_last": 9,
        },
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEANBANK_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def config_file(corpus: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "small.yaml", corpus)


@pytest.fixture
def trained(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> Path:
    """A run of `config_file`."""
    run = train(load_config(config_file), tmp_path / "run")
    capsys.readouterr()
    return run
