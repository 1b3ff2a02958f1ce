"""Checkpoints: a Hugging Face folder and the optimizer's state, whole or not there.

model.safetensors, config.json, generation_config.json, tokenizer.json   for `from_pretrained`
optimizer.safetensors   moments and random state
trainer.json            step and tokens
manifest.json           size and sha256 of every file, and what the checkpoint is of

Everything is safetensors or JSON, and the same whatever number of ranks has trained how: rank 0
writes whole tensors. `torch.distributed.checkpoint` is no help: its metadata is a pickle, and its
folder is none for `from_pretrained`.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from meanbank.core.errors import BankStorageError, one_line
from meanbank.core.files import aside_of, discard, flush, json_text, read_json
from meanbank.core.safetensors_file import safetensors_pieces
from meanbank.model import MeanbankForCausalLM
from meanbank.training.recipes import Optimizers
from meanbank.training.sharding import divided_as, whole

FOLDER = "checkpoints"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
TRAINER, TOKENIZER, MANIFEST = "trainer.json", "tokenizer.json", "manifest.json"
FORMAT = 1  # of the manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a checkpoint holds, as copies in main memory: training may go on.

    texts, tensors: content by file; facts: what the manifest says besides.
    """

    step: int
    tokens: int
    texts: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


def kept(tensor: Tensor) -> Tensor:
    """A copy in main memory."""
    return tensor.to("cpu", copy=True)


def left(tensor: Tensor) -> Tensor:
    """Nothing, on ranks that only help to gather."""
    return tensor.new_empty(0)


def snapshot(
    model: MeanbankForCausalLM,
    optimizer: Optimizers,
    tokenizer: Tokenizer | None,
    *,
    step: int,
    tokens: int,
    facts: Mapping[str, Any] | None = None,
    keeps: Callable[[Tensor], Tensor] = kept,
) -> Snapshot:
    """Copy the state after `step` steps; facts: `config` and `data`, which tell the run.

    Of what is divided over ranks, all is gathered, and every rank has to call this; keeps: the
    copy of a whole tensor, see `kept` and `left`.
    """
    from meanbank import __version__

    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [MeanbankForCausalLM.__name__]
    texts = {"config.json": model.config.to_json_string()}
    if model.generation_config is not None:
        texts["generation_config.json"] = model.generation_config.to_json_string()
    if tokenizer is not None:
        texts[TOKENIZER] = tokenizer.to_str(pretty=True)
    tensors = {MODEL: model.state_dict(), OPTIMIZER: _optimizer_tensors(optimizer)}
    return Snapshot(
        step=step,
        tokens=tokens,
        texts=texts,
        tensors={
            name: {key: keeps(whole(tensor.detach())) for key, tensor in found.items()}
            for name, found in tensors.items()
        },
        facts={"version": __version__, **(facts or {})},
    )


def _optimizer_tensors(optimizer: Optimizers) -> dict[str, Tensor]:
    tensors = {
        f"state.{index}.{key}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The steps that a checkpoint has behind it, from its name."""
    return int(path.name.split("-")[1])


def save_checkpoint(run: Path, taken: Snapshot, *, keep_last: int, keep_every: int = 0) -> Path:
    """Write a snapshot, check that it can be read again, give it its name; then prune others.

    The newest `keep_last` stay, and those at multiples of `keep_every`. OSError where it cannot be
    written, ValueError where other bytes are read than were written; those before stay then.
    """
    final = run / FOLDER / f"step-{taken.step:06d}"
    aside = aside_of(final)
    aside.mkdir(parents=True)
    try:
        _write(aside, taken)
        found = damage(aside)
        if found is not None:
            raise ValueError(f"the disk did not keep what was written: {found}")
        if final.exists():  # a damaged one: training has come here from the one before
            discard(final)
        aside.rename(final)
        flush(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _prune(run, taken.step, keep_last, keep_every)
    return final


def _write(folder: Path, taken: Snapshot) -> None:
    """Write all files, each down to the disk, and the manifest last."""
    of = {"step": taken.step, "tokens": taken.tokens}
    texts = {**taken.texts, TRAINER: json_text(of)}
    files = {name: _write_file(folder / name, [text.encode()]) for name, text in texts.items()}
    for name, tensors in taken.tensors.items():
        files[name] = _write_file(folder / name, safetensors_pieces(tensors, {"format": "pt"}))
    manifest = json_text({"format": FORMAT, **of, **taken.facts, "files": files})
    _write_file(folder / MANIFEST, [manifest.encode()])
    flush(folder)


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file down to the disk; returns what it should be when it is read again."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _read_file(path: Path) -> dict[str, Any]:
    """As `_write_file` returns it, of a file that is there."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def read_manifest(path: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest, None where it has none; ValueError where that is not one of ours."""
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST} is not a manifest")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint by its manifest, None where nothing is.

    Checkpoints of earlier versions have no manifest, and only loading them tells.
    """
    try:
        manifest = read_manifest(path)
        if manifest is None:
            return None
        for name, expected in manifest["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            found = _read_file(path / name)
            if found != expected:
                return f"{name} is not what was written ({found['size']:,} bytes)"
    except (OSError, ValueError) as error:
        return one_line(error)
    return None


def _prune(run: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Those beyond `step` go as well: training has come from before them, as they are damaged."""
    found = [path for path in checkpoints(run) if step_of(path) <= step]
    kept = set(found[-keep_last:])
    if keep_every:
        kept |= {path for path in found if step_of(path) % keep_every == 0}
    for path in checkpoints(run):
        if path not in kept:
            discard(path)


def load_checkpoint(
    path: Path, model: MeanbankForCausalLM, optimizer: Optimizers
) -> dict[str, Any]:
    """Put weights, moments and random state back; returns what `TRAINER` holds.

    Raises ValueError, in one line, for a checkpoint that is damaged.
    """
    with damage_told(path):
        found = damage(path)
        if found is not None:
            raise ValueError(found)
        saved = read_json(path / TRAINER)
        own, saved_model = model.state_dict(), load_file(path / MODEL)
        model.load_state_dict(
            {n: divided_as(t, own[n]) if n in own else t for n, t in saved_model.items()}
        )
        _restore_optimizer(optimizer, load_file(path / OPTIMIZER))
    return saved


def _restore_optimizer(optimizer: Optimizers, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors.pop("rng.cpu"))
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors.pop("rng.cuda"))
    state: dict[int, dict[str, Tensor]] = {}
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    for name, tensor in tensors.items():
        _, index, key = name.split(".", 2)
        like = parameters[int(index)]
        of_each_number = tensor.shape == like.shape
        own = divided_as(tensor, like) if of_each_number else tensor
        state.setdefault(int(index), {})[key] = own
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
