"""Our configuration in the fields of the KVM authors, where theirs can express it."""

import math
from typing import Any

from meanbank.core.config import to_plain
from meanbank.interop.kvm_fields import (
    DEFAULTS,
    MIXERS,
    MODEL_TYPE,
    NO_CAP,
    RESIDUALS,
    mlp_width,
    to_ours,
)
from meanbank.memory import KVM, OVQ, BlockWindow, Fixed, PowerLaw, Saturating, SlidingWindow
from meanbank.model import LayerPlan, MeanbankConfig
from meanbank.values import Projected

NAMES = {tag: mixer for mixer, tag in MIXERS.items()}


def to_theirs(config: MeanbankConfig) -> dict[str, Any]:
    """Their `config.json`; ValueError, with what differs, for a model that it cannot express."""
    if config.backbone != "gptalpha2":
        raise ValueError(f"the KVM paper's format has no {config.backbone} backbone")
    plans = config.plans()
    kinds: list[LayerPlan] = []
    for plan in plans:
        if not isinstance(plan.values, Projected):
            raise ValueError(f"the KVM paper's format has no {plan.values.tag} values")
        if plan not in kinds:
            kinds.append(plan)
    if len(kinds) > 2:
        raise ValueError(f"the KVM paper's format has two kinds of layers, the model {len(kinds)}")
    fields = {"model_type": MODEL_TYPE, "architectures": ["RWKV7BackboneForCausalLM"], **DEFAULTS}
    fields |= _sizes(config)
    main, every = plans[0], -1
    if len(kinds) == 2:  # layers 0, every, 2 every, ... are the alternate ones
        again = (i for i in range(1, len(plans)) if plans[i] == plans[0])
        main, every = plans[1], next(again, len(plans))
        if every == 1:
            raise ValueError(
                "the KVM paper's format cannot express this model: of two kinds of layers, the "
                "first one's comes again after every so many layers only"
            )
        fields |= _layer(config, plans[0], "alt_")
    fields |= {"alt_layer_every": every, **_layer(config, main, "")}
    if all(_residual(plan) == "none" for plan in kinds):
        fields["use_value_residual"] = 0  # theirs refuses the mode, not the switch
    elif any(_residual(plan) == "none" for plan in kinds):
        raise ValueError("the KVM paper's format has no residual in some kinds of layers only")
    read_back = to_ours(fields)
    names = ("intermediate_size", "mlp_token_shift", "residual_scale", "head_dim")
    pairs = [(name, getattr(read_back, name), getattr(config, name)) for name in names]
    pairs += [
        (f"layer {layer}: {part}", _meaning(getattr(theirs, part)), _meaning(getattr(ours, part)))
        for layer, (theirs, ours) in enumerate(zip(read_back.plans(), plans, strict=True))
        for part in ("memory", "values", "address")
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ValueError(
                f"the KVM paper's format cannot express this model: {name} would be read back as "
                f"{theirs}, not {ours}"
            )
    return fields


def _meaning(part: Any) -> Any:
    """A part of a plan without how it is computed."""
    settings = to_plain(part)
    settings.pop("backend", None)
    return settings


def _residual(plan: LayerPlan) -> str:
    assert isinstance(plan.values, Projected)
    return plan.values.residual or "none"


def _sizes(config: MeanbankConfig) -> dict[str, Any]:
    assert config.intermediate_size is not None
    return {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "d_qk_head": config.head_dim,
        "d_v_head": config.value_head_dim,
        "hidden_size": config.hidden_size,
        "ffn_expansion": _expansion(config.hidden_size, config.intermediate_size),
        "use_tokenshift_ffn": int(bool(config.mlp_token_shift)),
        "residual_scale": config.residual_scale,
        **{
            name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
    }


def _expansion(hidden_size: int, intermediate_size: int) -> float:
    """The ratio that is read back as that width, whatever the rounding of the division."""
    ratio = intermediate_size / hidden_size
    if mlp_width(hidden_size, ratio) < intermediate_size // 32 * 32:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _layer(config: MeanbankConfig, plan: LayerPlan, prefix: str) -> dict[str, Any]:
    """The fields of one kind of layer; those without the prefix are shared by both kinds."""
    mixer = NAMES[plan.memory.tag]
    fields: dict[str, Any] = {f"{prefix}token_mixer": mixer}
    values, memory = plan.values, plan.memory
    assert isinstance(values, Projected)
    if mixer != "rwkv7":
        family = mixer.partition("_")[0]
        if _residual(plan) != "none":
            modes = {ours: theirs for theirs, ours in RESIDUALS.items()}
            fields[f"{family}_value_residual_mode"] = modes[_residual(plan)]
        shifted = values.shift == "learned"
        fields[f"{family}_token_shift_mode"] = "rwkv" if shifted else "none"
    fields["use_tokenshift_att"] = 1
    assert plan.address.rotary_fraction is not None and config.head_dim is not None
    fields[f"{prefix}rope_partial_dim"] = round(plan.address.rotary_fraction * config.head_dim)
    fields[f"{prefix}rope_theta"] = plan.address.rope_theta
    if isinstance(memory, KVM):
        fields |= _kvm(memory)
    elif isinstance(memory, OVQ):
        fields |= {"ovq_chunk_size": memory.chunk_size, "ovq_window_size": memory.chunk_size}
        fields["ovq_max_centroids"] = getattr(memory.budget, "limit", 0)
    elif isinstance(memory, SlidingWindow):
        fields["swa_window_size"] = memory.window
    elif isinstance(memory, BlockWindow):
        fields |= {"chunk_len": memory.block_size, "n_bswa_chunks": memory.blocks}
        fields["sink_len"] = memory.sink
    return fields


def _kvm(memory: KVM) -> dict[str, Any]:
    gated = memory.merge_gate == "learned"
    return {
        "chunk_len": memory.chunk_size,
        "n_bswa_chunks": memory.window_chunks,
        "sink_len": memory.sink,
        "kvm_use_head_temps": int(memory.temperatures == "learned"),
        "kvm_use_vlens": int(memory.value_scale == "radius"),
        "kvm_use_merge_gate_keys": int(gated and "key" in memory.gated_parts),
        "kvm_use_merge_gate_values": int(gated and "value" in memory.gated_parts),
        "kvm_apply_merge_gate_to_appends": int("append" in memory.gated_writes),
        "kvm_apply_merge_gate_to_initial_state": int("initial" in memory.gated_writes),
        **_budget(memory),
    }


def _budget(memory: KVM) -> dict[str, Any]:
    budget, chunk = memory.budget, memory.chunk_size
    if isinstance(budget, Fixed):
        chunks = -(-budget.count // chunk)
        return {
            "state_budget_mode": "fixed",
            "state_min_len": budget.count,
            "n_max_d_chunks": chunks,
        }
    fields: dict[str, Any] = {
        "state_min_len": budget.min_rows,
        "n_max_d_chunks": -(-(NO_CAP if budget.cap is None else budget.cap) // chunk),
        "state_round_down": getattr(budget, "multiple", 1),
    }
    if isinstance(budget, PowerLaw):
        fields |= {"state_budget_mode": "power_law", "state_growth_factor": budget.factor}
        return fields | {"state_growth_exponent": budget.exponent}
    if isinstance(budget, Saturating):
        return fields | {"state_budget_mode": "kvm_saturation", "state_saturation_n": budget.limit}
    raise ValueError(f"the KVM paper's format has no {budget.tag} budget")
