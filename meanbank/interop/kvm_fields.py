"""The configuration of the KVM authors' checkpoints in our terms, and back.

Source: github.com/featherless-ai/KVM-paper at 6bd7dfd. Integers stand for booleans there, and -1
and null mostly for "off".
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from meanbank.interop.conversion import checked
from meanbank.model import MeanbankConfig

MODEL_TYPE = "rwkv7backbone"
MIXERS = {
    "gptalpha": "full",
    "gptalpha_bswa": "block_window",
    "swa": "sliding_window",
    "kvm": "kvm",
    "ovq": "ovq",
    "rwkv7": "rwkv7",
}
DEFAULTS: dict[str, Any] = {
    "model_class_path": "model.rwkv7_backbone.RWKV7BackboneForCausalLM",
    "vocab_size": 50304,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": None,
    "d_qk_head": None,
    "d_v_head": None,
    "d_head": None,
    "hidden_size": 768,
    "rope_theta": 10000.0,
    "rope_partial_dim": 64,
    "alt_rope_theta": 10000.0,
    "alt_rope_partial_dim": 64,
    "ffn_expansion": 4.0,
    "token_mixer": "rwkv7",
    "token_mixer_class_path": None,
    "alt_token_mixer": "swa",
    "alt_token_mixer_class_path": None,
    "alt_layer_every": -1,
    "use_tokenshift_ffn": 0,
    "residual_scale": None,
    "use_value_residual": 1,
    "use_tokenshift_att": 0,
    **{f"{mixer}_value_residual_mode": "rwkv" for mixer in ("gptalpha", "kvm", "ovq", "swa")},
    **{f"{mixer}_token_shift_mode": "rwkv" for mixer in ("gptalpha", "kvm", "ovq", "swa")},
    "kvm_apply_merge_gate_to_initial_state": 0,
    "kvm_apply_merge_gate_to_appends": 0,
    "kvm_use_merge_gate_keys": 1,
    "kvm_use_merge_gate_values": 1,
    "kvm_use_head_temps": 1,
    "kvm_use_vlens": 1,
    "swa_window_size": -1,
    "ovq_window_size": 128,
    "ovq_chunk_size": 128,
    "ovq_max_centroids": 2048,
    "sink_len": 1,
    "chunk_len": 256,
    "n_max_d_chunks": 1,
    "n_bswa_chunks": 2,
    "state_budget_mode": "fixed",
    "state_growth_factor": 1.0,
    "state_growth_exponent": 0.5,
    "state_round_down": 1,
    "state_min_len": -1,
    "state_saturation_n": None,
}
# Options outside this library; they must be off.
OFF = (
    "alt_share_v0",
    "use_block_lambdas",
    "use_skip_connections",
    "use_l2wrap",
    "logit_softcap",
    "ovq_normalize_centroids",
    "ovq_use_min_state_size",
    "ovq_use_counts_for_lr_only",
    "ovq_use_delta_rule",
    "use_state_deltarule",
    "use_state_decay",
)
# Of training, of kernels, or of mixers that are not chosen: no part in what these models compute.
IRRELEVANT = re.compile(
    r"mup_base_dim|param_dtype|use_overflow_v_key_weighting|tie_worhidden_sizedings"
    r"|kvm_aotriton_\w+|(kda|gated_deltanet|lact)_\w+"
)
# What every Hugging Face configuration may hold.
INHERITED = {
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "tie_word_embeddings",
    "torch_dtype",
    "use_cache",
}
NULL_IS_OFF = {"alt_layer_every", "state_min_len", "state_round_down", "swa_window_size"}
OPTIONAL_NUMBERS = {
    **{name: 1 for name in ("d_qk_head", "d_v_head", "d_head", "num_key_value_heads")},
    "state_saturation_n": 1,
    "residual_scale": 1.0,
}
POSITIVE = {
    *(name for name, value in OPTIONAL_NUMBERS.items() if isinstance(value, int)),
    *("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "chunk_len"),
    *("n_bswa_chunks", "n_max_d_chunks", "ovq_chunk_size", "ovq_window_size", "ovq_max_centroids"),
}
AT_LEAST_0 = {
    *("residual_scale", "ffn_expansion", "sink_len", "rope_theta", "alt_rope_theta"),
    *("state_growth_factor", "state_growth_exponent"),
    *(name for name in DEFAULTS if name.startswith(("use_", "kvm_use", "kvm_apply"))),
}
NO_CAP = 2**31  # rows: more than any sequence opens
RESIDUALS = {"rwkv": "gated", "linear": "linear", "none": "none"}
SHIFTS = {"rwkv": "learned", "linear": "none", "none": "none"}  # theirs shifts in one mode only


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Their fields, completed by their defaults.

    Raises ValueError that names what is unknown, or on and outside this library.
    """
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"model_type must be {MODEL_TYPE!r}, got {config.get('model_type')!r}")
    known = {*DEFAULTS, *OFF, *INHERITED, *PreTrainedConfig().to_dict()}
    unknown = sorted(n for n in config if n not in known and not IRRELEVANT.fullmatch(n))
    if unknown:
        raise ValueError(f"unknown settings in the configuration: {', '.join(unknown)}")
    for name in OFF:
        if config.get(name):
            raise ValueError(f"{name} is {config[name]!r}: it is outside this library")
    if config.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings is on: their models do not tie embeddings")
    return {name: _field(name, config.get(name, default)) for name, default in DEFAULTS.items()}


def _field(name: str, value: Any) -> Any:
    """A field's value, checked; null stands for "off" where theirs has a number for that."""
    default = DEFAULTS[name]
    if value is None and (default is None or name in NULL_IS_OFF):
        return default
    kind = type(OPTIONAL_NUMBERS.get(name, "" if default is None else default))
    least = 1 if name in POSITIVE else 0 if name in AT_LEAST_0 else -1
    return checked(name, value, kind, least)


def to_ours(config: Mapping[str, Any]) -> MeanbankConfig:
    """Our configuration of their model."""
    fields = read_fields(config)
    if fields["model_class_path"] != DEFAULTS["model_class_path"]:
        raise ValueError(f"model_class_path {fields['model_class_path']!r} is not known")
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    every = fields["alt_layer_every"]
    layers = fields["num_hidden_layers"]
    main = _layer(fields, "")
    entries = [main] * layers
    if every > 1:
        alternate = _layer(fields, "alt_")
        if alternate["memory"]["type"] == main["memory"]["type"]:
            raise ValueError(
                f"token_mixer and alt_token_mixer are both {fields['token_mixer']!r}, whose value "
                "residuals refer to two first layers; that is not supported"
            )
        if layers < 2:
            raise ValueError("alt_layer_every needs at least two layers")
        entries = [main if layer % every else alternate for layer in range(layers)]
    return MeanbankConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        num_hidden_layers=layers,
        num_attention_heads=fields["num_attention_heads"],
        num_key_value_heads=fields["num_key_value_heads"],
        head_dim=fields["d_qk_head"] or fields["d_head"] or head_dim,
        value_head_dim=fields["d_v_head"] or fields["d_head"] or head_dim,
        intermediate_size=mlp_width(fields["hidden_size"], fields["ffn_expansion"]),
        rope_theta=fields["rope_theta"],
        residual_scale=fields["residual_scale"] or 1.0,
        mlp_token_shift=bool(fields["use_tokenshift_ffn"]),
        layers=entries,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
    )


def mlp_width(hidden_size: int, expansion: float) -> int:
    """Width of their MLP, rounded down to a multiple of 32."""
    return int(hidden_size * expansion) // 32 * 32


def _mixer(fields: dict[str, Any], prefix: str) -> str:
    """The name of a mixer, which a class path may give as well."""
    name, path = fields[f"{prefix}token_mixer"], fields[f"{prefix}token_mixer_class_path"]
    if path is not None:  # the Triton twin of a mixer has the same weights
        named = re.fullmatch(r"model\.(\w+?)(_triton)?_mixer\.SequenceMixer", str(path))
        if named is None:
            raise ValueError(f"{prefix}token_mixer_class_path {path!r} is not known")
        name = named[1]
    if name not in MIXERS:
        raise ValueError(f"{prefix}token_mixer {name!r} is outside this library")
    return name


def _layer(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    """One kind of layer as an entry of `MeanbankConfig.layers`."""
    mixer = _mixer(fields, prefix)
    memory = MEMORIES[mixer](fields)
    if mixer == "rwkv7":
        if not fields["use_value_residual"]:
            raise ValueError("use_value_residual is off, which RWKV-7 layers do not allow")
        return {"memory": memory}
    family = mixer.partition("_")[0]
    residual, shift = fields[f"{family}_value_residual_mode"], fields[f"{family}_token_shift_mode"]
    for name, mode, modes in (
        (f"{family}_value_residual_mode", residual, RESIDUALS),
        (f"{family}_token_shift_mode", shift, SHIFTS),
    ):
        if mode not in modes:
            raise ValueError(f"{name} {mode!r} is outside this library")
    shifted = SHIFTS[shift] if fields["use_tokenshift_att"] else "none"
    address: dict[str, Any] = {"token_shift": shifted}
    if mixer != "ovq":
        address |= _rotary(fields, prefix, mixer)
    return {
        "memory": memory,
        "values": {
            "type": "projection",
            "residual": RESIDUALS[residual] if fields["use_value_residual"] else "none",
            "shift": shifted,
        },
        "address": address,
    }


def _rotary(fields: dict[str, Any], prefix: str, mixer: str) -> dict[str, Any]:
    head_dim = (
        fields["d_qk_head"]
        or fields["d_head"]
        or fields["hidden_size"] // fields["num_attention_heads"]
    )
    channels = fields[f"{prefix}rope_partial_dim"]
    if mixer == "kvm":
        if channels <= 0:
            raise ValueError(f"{prefix}rope_partial_dim is {channels}: their KVM zeroes whole keys")
        if channels != fields["rope_partial_dim"]:
            raise ValueError(
                f"alt_rope_partial_dim ({channels}) differs from rope_partial_dim "
                f"({fields['rope_partial_dim']}), by which their KVM zeroes keys; that is not "
                "supported"
            )
    rotary: dict[str, Any] = {"rotary_fraction": max(channels, 0) / head_dim}
    theta = fields[f"{prefix}rope_theta"]
    return rotary if theta == fields["rope_theta"] else {**rotary, "rope_theta": theta}


def _kvm(fields: dict[str, Any]) -> dict[str, Any]:
    parts = ["key"] if fields["kvm_use_merge_gate_keys"] else []
    parts += ["value"] if fields["kvm_use_merge_gate_values"] else []
    writes = ["initial"] if fields["kvm_apply_merge_gate_to_initial_state"] else []
    writes += ["append"] if fields["kvm_apply_merge_gate_to_appends"] else []
    return {
        "type": "kvm",
        "chunk_size": fields["chunk_len"],
        "window_chunks": fields["n_bswa_chunks"],
        "sink": fields["sink_len"],
        "budget": _budget(fields),
        "temperatures": "learned" if fields["kvm_use_head_temps"] else "none",
        "merge_gate": "learned" if parts else "none",
        "value_scale": "radius" if fields["kvm_use_vlens"] else "chunk_count",
        "gated_writes": [*writes, "merge"],
        "gated_parts": parts or ["key", "value"],
    }


def _budget(fields: dict[str, Any]) -> dict[str, Any]:
    mode, least = fields["state_budget_mode"], max(fields["state_min_len"], 0)
    cap = fields["n_max_d_chunks"] * fields["chunk_len"]
    if mode == "fixed":  # and never below the first chunk's rows
        return {"type": "fixed", "count": max(min(least, cap), 1)}
    limits = {
        "min_rows": least,
        "cap": None if cap >= NO_CAP else cap,
        "multiple": max(fields["state_round_down"], 1),
    }
    if mode == "power_law":
        factor, exponent = fields["state_growth_factor"], fields["state_growth_exponent"]
        return {"type": "power_law", "factor": factor, "exponent": exponent, **limits}
    if mode == "kvm_saturation":
        return {"type": "saturating", "limit": fields["state_saturation_n"], **limits}
    raise ValueError(f"state_budget_mode {mode!r} is not known")


def _sliding_window(fields: dict[str, Any]) -> dict[str, Any]:
    window = fields["swa_window_size"]
    return {"type": "sliding_window", "window": fields["chunk_len"] if window <= 0 else window}


def _block_window(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "block_window",
        "block_size": fields["chunk_len"],
        "blocks": fields["n_bswa_chunks"],
        "sink": fields["sink_len"],
    }


def _ovq(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["ovq_window_size"] != fields["ovq_chunk_size"]:
        raise ValueError(
            f"ovq_window_size ({fields['ovq_window_size']}) differs from ovq_chunk_size "
            f"({fields['ovq_chunk_size']}): that is outside this library"
        )
    budget = {"type": "saturating", "limit": fields["ovq_max_centroids"]}
    return {"type": "ovq", "chunk_size": fields["ovq_chunk_size"], "budget": budget}


MEMORIES = {
    "gptalpha": lambda fields: {"type": "full"},
    "gptalpha_bswa": _block_window,
    "swa": _sliding_window,
    "kvm": _kvm,
    "ovq": _ovq,
    "rwkv7": lambda fields: {"type": "rwkv7"},
}
