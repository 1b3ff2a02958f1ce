"""The BoV authors' nanochat checkpoints: `meta_*.json` and `model_*.pt`, read into ours.

Source: github.com/RiddleHe/nanochat, branch research/bank_of_values, at bee6dac. Only tensors are
unpickled (`weights_only`), and only by this explicit import.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanbank.core.files import read_object
from meanbank.interop import conversion
from meanbank.interop.conversion import Conversion, check_free, checked
from meanbank.model import MeanbankConfig
from meanbank.model.plan import layers_at

SIZES = {
    "sequence_len": 2048,
    "vocab_size": 32768,
    "n_layer": 12,
    "n_head": 6,
    "n_kv_head": 6,
    "n_embd": 768,
    "window_pattern": "SSSL",
}
# One of these says where values come from; the two learned_* say how they are scaled.
SOURCES = (
    "add_init_v",
    "add_init_res_v",
    "add_init_value_emb",
    "add_init_value_emb_nanogpt",
    "v_from_x0",
    "v_from_v1",
    "v_from_value_emb",
    "v_scale_learn",
)
LEARNED, LEARNED_PER_HEAD = "learn_init_coeffs", "learn_init_scaling_vec"
TARGETS = {
    "on_every_layer": "all",
    "on_second_half_layers": "second_half",
    "on_last_two_thirds_layers": "last_two_thirds",
    "on_every_two_layers": "every_other",
}
OFF = (
    "add_init_res",
    "add_init_pre_norm_attn_only",
    "add_init_pre_norm_mlp_only",
    "add_init_qkv",
    "add_init_qkv_shared",
    "add_init_proj",
    "v_exclude_self",
    "detach_init_value",
)
NAMES = [
    (r"^model\.embedding\.weight$", "transformer.wte.weight"),
    (r"^model\.stem\.gate\.", "smear_gate."),
    (r"^model\.stem\.mix$", "smear_lambda"),
    (r"^model\.layers\.(\d+)\.attention\.values\.(other\.)?table$", r"value_embeds.\1.weight"),
    (r"^model\.layers\.", "transformer.h."),
    (r"\.attention\.address\.query\.", ".attn.c_q."),
    (r"\.attention\.address\.key\.", ".attn.c_k."),
    (r"\.attention\.values\.(contextual\.)?projection\.", ".attn.c_v."),
    (r"\.attention\.values\.contextual_weight$", ".attn.alpha_v"),
    (r"\.attention\.values\.other_weight$", ".attn.beta_v"),
    (r"\.attention\.values\.gate\.", ".attn.ve_gate."),
    (r"\.attention\.values\.(contextual\.)?scale$", ".attn.gamma_v"),
    (r"\.attention\.output\.", ".attn.c_proj."),
    (r"\.mlp\.up\.", ".mlp.c_fc."),
    (r"\.mlp\.down\.", ".mlp.c_proj."),
]


def target_layers(fields: Mapping[str, Any]) -> list[int]:
    """The layers whose values come from elsewhere; by default the last third."""
    chosen = [place for name, place in TARGETS.items() if fields.get(name)]
    if len(chosen) > 1:
        raise ValueError(f"more than one of {', '.join(TARGETS)} is on")
    return layers_at(chosen[0] if chosen else "last_third", fields["n_layer"])


def to_ours(fields: Mapping[str, Any]) -> MeanbankConfig:
    """Our configuration of their model; ValueError names what is unknown or outside."""
    known = {*SIZES, *SOURCES, *TARGETS, *OFF, LEARNED, LEARNED_PER_HEAD, "value_emb_shared"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"unknown settings in the configuration: {', '.join(unknown)}; read are checkpoints of "
            "the BoV authors' branch research/bank_of_values"
        )
    for name in OFF:
        if fields.get(name):
            raise ValueError(f"{name} is on: it is outside this library")
    fields = read_fields(fields)
    windows = _windows(fields)
    plan: list[dict[str, Any]] = [
        {"where": [layer], "memory": {"type": "sliding_window", "window": window + 1}}
        for layer, window in enumerate(windows)
    ]
    source = _source(fields)
    targets = target_layers(fields)
    if source is not None:
        if fields.get("v_from_v1") or fields.get("add_init_v"):
            targets = [layer for layer in targets if layer]  # layer 0 has nothing to take over
        plan.append({"where": targets, "values": source})
    return MeanbankConfig(
        backbone="nanochat",
        vocab_size=fields["vocab_size"],
        hidden_size=fields["n_embd"],
        num_hidden_layers=fields["n_layer"],
        num_attention_heads=fields["n_head"],
        num_key_value_heads=fields["n_kv_head"],
        intermediate_size=4 * fields["n_embd"],
        plan=plan,
    )


def read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Their fields, sizes completed and types checked."""
    return {
        name: checked(name, value, type(SIZES.get(name, 0)), 1 if name in SIZES else 0)
        for name, value in {**SIZES, **fields}.items()
    }


def _windows(fields: Mapping[str, Any]) -> list[int]:
    """Tokens before itself that each layer's query sees."""
    pattern, long = str(fields["window_pattern"]).upper(), fields["sequence_len"]
    if not pattern or set(pattern) - {"S", "L"}:
        raise ValueError(f"window_pattern must be made of S and L, got {pattern!r}")
    short = math.ceil(math.ceil(long / 4) / 128) * 128  # a quarter, to a multiple of 128
    windows = [
        long if pattern[i % len(pattern)] == "L" else short for i in range(fields["n_layer"])
    ]
    return [*windows[:-1], long]


def _source(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    on = [name for name in SOURCES if fields.get(name)]
    if len(on) > 1:
        raise ValueError(f"more than one source of values is on: {', '.join(on)}")
    if not on:
        return None
    learned = "learned" if fields.get(LEARNED) else "fixed"
    first = {"type": "first_layer", "layer": 0}
    bank = {"type": "bank", "table": "shared" if fields.get("value_emb_shared") else "own"}
    initial = {"type": "initial_embedding"}
    if fields.get(LEARNED_PER_HEAD) and on != ["v_from_v1"]:
        raise ValueError(f"{LEARNED_PER_HEAD} is on without v_from_v1")
    mixed = {
        "add_init_v": first,
        "add_init_res_v": initial,
        "add_init_value_emb": bank,
    }
    if on[0] in mixed:
        other = {**mixed[on[0]], "scale": "fixed"}
        return {"type": "mixed", "other": other, "coefficients": learned}
    if on[0] == "add_init_value_emb_nanogpt":
        if fields.get("value_emb_shared"):
            raise ValueError("value_emb_shared with add_init_value_emb_nanogpt is not supported")
        return {"type": "gated_additive"}
    if on[0] == "v_scale_learn":
        return {"type": "projection", "scale": "learned"}
    alone = {"v_from_x0": initial, "v_from_v1": first, "v_from_value_emb": bank}[on[0]]
    return {**alone, "scale": "per_head" if fields.get(LEARNED_PER_HEAD) else learned}


def convert(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Conversion:
    """Their configuration and tensors in our terms; ValueError names whatever does not fit.

    Rows of the vocabulary's padding are cut off.
    """
    ours = to_ours(fields)
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}
    targets = target_layers({**SIZES, **fields})
    shared = f"value_embeds.{targets[0]}.weight"

    def their_name(name: str) -> str:
        if name == "model.shared_table":
            return shared
        if fields.get(LEARNED_PER_HEAD) and name.endswith("values.scale"):
            return name.replace("model.layers", "transformer.h").replace(
                "attention.values.scale", "attn.lambda_v"
            )
        for pattern, theirs in NAMES:
            name = re.sub(pattern, theirs, name)
        return name

    def cut(name: str, tensor: Tensor) -> Tensor:
        indexed = name in ("model.embedding.weight", "lm_head.weight", "model.shared_table")
        padded = -(-ours.vocab_size // 64) * 64
        if (indexed or name.endswith(".table")) and tensor.shape[:1] == (padded,):
            return tensor[: ours.vocab_size]
        return tensor

    dead = {
        f"transformer.h.{layer}.attn.c_v.weight": "its product is replaced"
        for layer, plan in enumerate(ours.plans())
        if plan.values.tag in ("bank", "first_layer")
    }
    if 0 in targets and (fields.get("v_from_v1") or fields.get("add_init_v")):
        for name in ("gamma_v", "lambda_v", "alpha_v", "beta_v"):
            dead[f"transformer.h.0.attn.{name}"] = "layer 0 keeps its own values"
    return conversion.convert(ours, tensors, their_name, dead, cut)


def import_nanochat(
    source: str | Path, destination: str | Path, step: int | None = None
) -> Conversion:
    """Read a checkpoint folder of nanochat, by default its last step, and write ours.

    Its tokenizer is a pickle and stays behind. Raises ValueError, in one line, for a folder that is
    not theirs, an option outside this library, a tensor that is missing or unknown, or a
    destination that exists.
    """
    source, destination = Path(source), Path(destination)
    check_free(destination)
    steps = sorted(
        int(found[1])
        for path in (source.iterdir() if source.is_dir() else ())
        if (found := re.fullmatch(r"model_(\d+)\.pt", path.name))
    )
    if source.is_file():
        raise ValueError(f"{source} is a file; give its folder")
    if not steps:
        raise ValueError(f"{source} holds no model_STEP.pt")
    step = steps[-1] if step is None else step
    if step not in steps:
        listed = ", ".join(map(str, steps))
        raise ValueError(f"{source} holds no step {step}; there are {listed}")
    meta = read_object(source / f"meta_{step:06d}.json")
    fields, kind = meta.get("model_config"), str(meta.get("model_type", "gpt_base"))
    if not isinstance(fields, dict):
        raise ValueError(f"{source / f'meta_{step:06d}.json'} has no model_config")
    if not kind.startswith("gpt_base"):
        raise ValueError(f"model_type {kind!r} is outside this library")
    converted = convert(fields, _read_weights(source / f"model_{step:06d}.pt"))
    converted.save(destination)
    return converted


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # the unpickler raises many kinds for a damaged or hostile file
        raise ValueError(
            f"cannot read {path} as plain tensors: it is damaged, or holds more"
        ) from None
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} holds something other than named tensors")
    return tensors
