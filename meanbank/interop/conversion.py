"""A checkpoint on its way into ours: every tensor accounted for, the folder whole or not there."""

import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meanbank.core.files import read_object
from meanbank.model import MeanbankConfig, MeanbankForCausalLM
from meanbank.model.accounting import empty_model

LARGEST = 1e9  # of any number in a configuration
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A configuration and weights in our terms.

    names: their name of each of our parameters.
    dropped: names of their tensors that have no part in the model's output, and why.
    """

    config: MeanbankConfig
    tensors: dict[str, Tensor]
    names: dict[str, str]
    dropped: dict[str, str]

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of the model: the narrowest that loses no weight's precision."""
        return functools.reduce(torch.promote_types, {t.dtype for t in self.tensors.values()})

    def model(self) -> MeanbankForCausalLM:
        """The model, in `dtype`."""
        model = MeanbankForCausalLM(self.config)
        model.to(self.dtype)  # pyright: ignore[reportArgumentType]
        model.load_state_dict(self.tensors)
        return model.eval()

    def save(self, folder: str | Path, extras: Sequence[Path] = ()) -> None:
        """Write what `from_pretrained` reads, and copies of other files; whole or not at all.

        Raises ValueError where something stands in the way.
        """
        self.config.dtype = self.dtype
        self.config.architectures = [MeanbankForCausalLM.__name__]
        tensors = {name: tensor.to(self.dtype) for name, tensor in self.tensors.items()}

        def write(aside: Path) -> None:
            self.config.save_pretrained(aside)
            save_tensors(tensors, aside / WEIGHTS)
            for extra in extras:
                shutil.copyfile(extra, aside / extra.name)

        write_folder(Path(folder), write)


def convert(
    config: MeanbankConfig,
    given: Mapping[str, Tensor],
    their_name: Callable[[str], str],
    dead: Mapping[str, str],
    cut: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> Conversion:
    """Our model from their tensors.

    given: theirs, by their name; their_name: of one of our parameters; dead: theirs that no output
    depends on, with the reason; cut: takes off padding, by our name. Raises ValueError that names
    every tensor that is missing, unknown or of another shape.
    """
    try:
        shapes = {name: p.shape for name, p in empty_model(config).named_parameters()}
    except (RuntimeError, OverflowError) as error:  # sizes beyond what PyTorch can describe
        raise ValueError(f"the configuration's sizes do not make a model: {error}") from None
    names = {name: their_name(name) for name in shapes}
    missing = sorted(theirs for theirs in names.values() if theirs not in given)
    unknown = sorted(set(given) - set(names.values()) - set(dead))
    for kind, found in (("lacks", missing), ("holds, unknown to its configuration,", unknown)):
        if found:
            raise ValueError(f"the checkpoint {kind} {', '.join(found)}")
    tensors = {}
    for name, shape in shapes.items():
        tensor = cut(name, given[names[name]])
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.dtype not in FLOATS or tensor.squeeze().shape != _squeezed(shape):
            raise ValueError(
                f"{names[name]} must hold floating-point numbers of shape {list(shape)}, got "
                f"{tensor.dtype} of shape {list(tensor.shape)}"
            )
        tensors[name] = tensor.reshape(shape).contiguous()
    dropped = {name: reason for name, reason in dead.items() if name in given}
    return Conversion(config, tensors, names, dropped)


def _squeezed(shape: torch.Size) -> torch.Size:
    """Without dimensions of one, which they put before vectors and numbers."""
    return torch.Size(size for size in shape if size != 1)


def checked(name: str, value: Any, kind: type, least: float) -> Any:
    """A setting of that type, at least so large; ValueError names what is something else.

    Numbers stand for booleans, and integers for floats.
    """
    accepted = {float: (int, float), int: (int, bool)}.get(kind, (kind,))
    fits = isinstance(value, accepted)
    if fits and kind in (int, float):
        fits = least <= value < LARGEST
    if not fits:
        limit = f" from {least} to {LARGEST:g}" if kind in (int, float) else ""
        raise ValueError(f"{name} must be of type {kind.__name__}{limit}, got {str(value)[:80]!r}")
    return value


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder, whole or in shards; never a pickle."""
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        listed = read_object(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or any(Path(str(n)).name != n for n in listed.values()):
            raise ValueError(f"{folder / INDEX} lists no files of that folder")
        files = [folder / name for name in sorted(set(listed.values()))]
    else:
        raise ValueError(f"{folder} holds no {WEIGHTS} and no {INDEX}; other formats are not read")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                names = list(opened.keys())
                tensors.update((name, opened.get_tensor(name)) for name in names)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {file}: {error}") from None
    return tensors


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Each tensor by itself, also where some share memory, as tied weights of a pickle do."""
    places: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in places else tensor.contiguous()
        places.add(place)
    save_file(apart, path, metadata={"format": "pt"})


def check_free(folder: Path) -> None:
    """Raise ValueError where something stands in the way of a new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give the name of a new folder")


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder aside, then put it in its place: whole or not there."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write(aside)
        for file in aside.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        aside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
