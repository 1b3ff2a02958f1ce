"""Checkpoints: a Hugging Face folder and the optimizer's state, whole or not there."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from meanbank.core.errors import BankStorageError, one_line
from meanbank.core.files import read_json, write_json
from meanbank.model import MeanbankForCausalLM
from meanbank.training.recipes import Optimizers

FOLDER = "checkpoints"
OPTIMIZER, TRAINER, TOKENIZER = "optimizer.safetensors", "trainer.json", "tokenizer.json"


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def save_checkpoint(
    run: Path,
    step: int,
    model: MeanbankForCausalLM,
    optimizer: Optimizers,
    tokenizer: Tokenizer | None,
    *,
    tokens: int,
    keep_last: int,
) -> Path:
    """Write the state after `step` steps aside, flush it, rename it; then prune older ones."""
    final = run / FOLDER / f"step-{step:06d}"
    aside = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    for left in final.parent.glob(".step-*.tmp"):  # of a try that was killed
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        model.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save(str(aside / TOKENIZER))
        save_file(_optimizer_tensors(optimizer), aside / OPTIMIZER)
        write_json(aside / TRAINER, {"step": step, "tokens": tokens})
        for path in aside.iterdir():
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _flush(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in checkpoints(run)[:-keep_last]:
        shutil.rmtree(old)
    return final


def load_checkpoint(
    path: Path, model: MeanbankForCausalLM, optimizer: Optimizers
) -> dict[str, Any]:
    """Put weights, moments and random state back; returns what `TRAINER` holds."""
    with damage_told(path):
        model.load_state_dict(load_file(path / "model.safetensors"))
        tensors = load_file(path / OPTIMIZER)
        _restore_optimizer(optimizer, tensors)
    return read_json(path / TRAINER)


def _restore_optimizer(optimizer: Optimizers, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors.pop("rng.cpu"))
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors.pop("rng.cuda"))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, index, key = name.split(".", 2)
        state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


@contextlib.contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Turn what loading a damaged checkpoint raises into one line."""
    try:
        yield
    except BankStorageError:  # tells what to do itself
        raise
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"the checkpoint {path} is damaged: {one_line(error)}") from error


def _optimizer_tensors(optimizer: Optimizers) -> dict[str, Tensor]:
    tensors = {
        f"state.{index}.{key}": value.contiguous()
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
