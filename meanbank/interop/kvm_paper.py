"""The KVM authors' Hugging Face folders: read into ours, and written back.

Their code is never run; tensors are read from safetensors only.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanbank.core.errors import one_line
from meanbank.core.files import read_object, write_json
from meanbank.interop import conversion
from meanbank.interop.conversion import (
    WEIGHTS,
    Conversion,
    check_free,
    read_safetensors,
    save_tensors,
    write_folder,
)
from meanbank.interop.kvm_export import to_theirs
from meanbank.interop.kvm_fields import to_ours
from meanbank.model import MeanbankConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
# Our names and theirs, for softmax attention and for the RWKV-7 time mix.
COMMON = {
    "model.embedding.weight": "transformer.wte.weight",
    "model.stem.norm.": "transformer.ln_emb.",
    "model.norm.": "transformer.ln_head.",
    "lm_head.weight": "lm_head.weight",
    "attention_norm.": "ln_attn.",
    "mlp_norm.": "ln_mlp.",
    "mlp.shift": "mlp.x_k",
    "mlp.up.": "mlp.c_fc.",
    "mlp.down.": "mlp.c_proj.",
}
ATTENTION = {
    "attention.address.query_shift": "attn.x_q",
    "attention.address.key_shift": "attn.x_k",
    "attention.values.shift": "attn.x_v",
    "attention.address.query_norm.": "attn.ln_q.",
    "attention.address.key_norm.": "attn.ln_k.",
    "attention.address.query.": "attn.c_q.",
    "attention.address.key.": "attn.c_k.",
    "attention.values.projection.": "attn.c_v.",
    "attention.values.residual.base": "attn.v_gate0",
    "attention.values.residual.down.": "attn.v_gate1.",
    "attention.values.residual.up.": "attn.v_gate2.",
    "attention.values.residual.share": "attn.lamb",
    "attention.memory.window_temperature": "attn.front_head_temp",
    "attention.memory.state_temperature": "attn.state_head_temp",
    "attention.memory.temperature": "attn.beta",
    "attention.memory.norm.": "attn.ln_s_k.",
    "attention.memory.gate.": "attn.key_weighting.",
    "attention.output.": "attn.c_proj.",
}
LOW_RANK = {"decay": "w", "rate": "a", "gate": "g", "values.residual": "v"}
TIME_MIX = {
    **{
        f"attention.shifts.{ours}": f"attn.x_{theirs}"
        for ours, theirs in {
            "receptance": "r",
            "decay": "w",
            "key": "k",
            "value": "v",
            "rate": "a",
            "gate": "g",
        }.items()
    },
    **{f"attention.{ours}.base": f"attn.{letter}0" for ours, letter in LOW_RANK.items()},
    **{f"attention.{ours}.down.": f"attn.{letter}1." for ours, letter in LOW_RANK.items()},
    **{f"attention.{ours}.up.": f"attn.{letter}2." for ours, letter in LOW_RANK.items()},
    "attention.receptance.": "attn.receptance.",
    "attention.key.": "attn.key.",
    "attention.values.projection.": "attn.value.",
    "attention.removal": "attn.k_k",
    "attention.replacement": "attn.k_a",
    "attention.bonus": "attn.r_k",
    "attention.norm.": "attn.ln_x.",
    "attention.output.": "attn.output.",
}
# Vectors that they keep as (1, 1, width).
BROADCAST = re.compile(r"\.(v_gate0|mlp\.x_k)$|\.attn\.(x_[rwkvag]|[wav]0|k_[ka])$")


def their_name(name: str, config: MeanbankConfig) -> str:
    """Their name of one of our parameters."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return _renamed(name, COMMON)
    recurrent = config.plans()[int(layer[1])].memory.tag == "rwkv7"
    rest = _renamed(name[layer.end() :], COMMON | (TIME_MIX if recurrent else ATTENTION))
    return f"transformer.h.{layer[1]}.{rest}"


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        if name == ours or (ours.endswith(".") and name.startswith(ours)):
            return theirs + name[len(ours) :]
    raise ValueError(f"{name} has no counterpart in the KVM paper's checkpoints")


def their_shape(name: str, shape: torch.Size, config: MeanbankConfig) -> tuple[int, ...]:
    """The shape that one of their parameters has."""
    layer = re.match(r"transformer\.h\.(\d+)\.attn\.x_", name)
    flat = layer is not None and config.plans()[int(layer[1])].memory.tag != "rwkv7"
    return (1, 1, *shape) if BROADCAST.search(name) and not flat else tuple(shape)


def convert(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Conversion:
    """Their configuration and tensors in our terms; ValueError names whatever does not fit."""
    ours = to_ours(config)
    return conversion.convert(ours, tensors, lambda name: their_name(name, ours), _dead(ours))


def _dead(config: MeanbankConfig) -> dict[str, str]:
    """A shift that their value residual makes, and reads nowhere, in layers without shifts."""
    return {
        f"transformer.h.{layer}.attn.x_v": "read nowhere in their code"
        for layer, plan in enumerate(config.plans())
        if getattr(plan.values, "residual", None) == "gated"
        and getattr(plan.values, "shift", None) == "none"
        and plan.memory.tag != "rwkv7"
    }


def import_kvm_paper(source: str | Path, destination: str | Path) -> Conversion:
    """Read a folder of the KVM authors and write ours, tokenizer files included.

    Raises ValueError, in one line, for a folder that is not theirs, an option outside this
    library, a tensor that is missing or unknown, or a destination that exists.
    """
    source, destination = Path(source), Path(destination)
    check_free(destination)
    converted = convert(read_object(source / "config.json"), read_safetensors(source))
    converted.save(destination, _tokenizer_files(source))
    return converted


def export_kvm_paper(source: str | Path, destination: str | Path) -> None:
    """Write one of our folders as the KVM authors': `config.json` and safetensors.

    An imported model of one dtype exported again has the same tensors, bit by bit, but for those
    that no output depends on, which become zeros. Raises ValueError for a model that theirs cannot
    express, such as one with a bank, and for a damaged folder.
    """
    source, destination = Path(source), Path(destination)
    check_free(destination)
    ours = _read_ours(source)
    fields = to_theirs(ours.config)
    fields["param_dtype"] = str(ours.dtype).removeprefix("torch.")
    tensors = {}
    for name, tensor in ours.tensors.items():
        theirs = their_name(name, ours.config)
        shape = their_shape(theirs, tensor.shape, ours.config)
        tensors[theirs] = tensor.to(ours.dtype).reshape(shape)
    width = (ours.config.num_key_value_heads or 0) * (ours.config.value_head_dim or 0)
    for name in _dead(ours.config):
        tensors[name] = torch.zeros(width, dtype=ours.dtype)

    def write(folder: Path) -> None:
        write_json(folder / "config.json", fields)
        save_tensors(tensors, folder / WEIGHTS)
        for file in _tokenizer_files(source):
            shutil.copyfile(file, folder / file.name)

    write_folder(destination, write)


def _read_ours(source: Path) -> Conversion:
    """One of our folders, every tensor accounted for."""
    if (source / "checkpoints").is_dir():
        raise ValueError(
            f"{source} is a run; give one of its checkpoints, {source}/checkpoints/STEP"
        )
    settings = read_object(source / "config.json")
    if settings.get("model_type") != MeanbankConfig.model_type:
        raise ValueError(f"{source} is not a meanbank model")
    try:
        config = MeanbankConfig.from_dict(settings)
    except Exception as error:  # a damaged file fails in transformers in many ways
        raise ValueError(f"{source / 'config.json'}: {one_line(error)}") from None
    return conversion.convert(config, read_safetensors(source), lambda name: name, {})


def _tokenizer_files(source: Path) -> list[Path]:
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
