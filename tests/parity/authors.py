"""The KVM authors' configuration fields and parameter names in our terms, for the parity tests."""

import re

RENAMES = [
    (r"^transformer\.wte\.", "model.embedding."),
    (r"^transformer\.ln_emb\.", "model.embedding_norm."),
    (r"^transformer\.ln_head\.", "model.norm."),
    (r"^transformer\.h\.(\d+)\.ln_attn\.", r"model.layers.\1.attention_norm."),
    (r"^transformer\.h\.(\d+)\.ln_mlp\.", r"model.layers.\1.mlp_norm."),
    (r"^transformer\.h\.(\d+)\.", r"model.layers.\1."),
    (r"\.attn\.", ".attention."),
    (r"attention\.x_q$", "attention.address.query_shift"),
    (r"attention\.x_k$", "attention.address.key_shift"),
    (r"attention\.x_v$", "attention.values.shift"),
    (r"attention\.c_q\.", "attention.address.query."),
    (r"attention\.c_k\.", "attention.address.key."),
    (r"attention\.c_v\.", "attention.values.projection."),
    (r"attention\.ln_q\.", "attention.address.query_norm."),
    (r"attention\.ln_k\.", "attention.address.key_norm."),
    (r"attention\.v_gate0$", "attention.values.residual.base"),
    (r"attention\.v_gate1\.", "attention.values.residual.down."),
    (r"attention\.v_gate2\.", "attention.values.residual.up."),
    (r"attention\.front_head_temp$", "attention.memory.window_temperature"),
    (r"attention\.state_head_temp$", "attention.memory.state_temperature"),
    (r"attention\.ln_s_k\.", "attention.memory.norm."),
    (r"attention\.key_weighting\.", "attention.memory.gate."),
    (r"attention\.c_proj\.", "attention.output."),
    (r"mlp\.x_k$", "mlp.shift"),
    (r"mlp\.c_fc\.", "mlp.up."),
    (r"mlp\.c_proj\.", "mlp.down."),
]


def our_name(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def budget(config: dict) -> dict:
    kind, limits = config["state_budget_mode"], {"min_rows": max(config["state_min_len"], 0)}
    if kind == "fixed":
        count = config["n_max_d_chunks"] * config["chunk_len"]
        return {"type": "fixed", "count": count, **limits}
    limits |= {"cap": config["n_max_d_chunks"] * config["chunk_len"]}
    if kind == "power_law":
        factor, exponent = config["state_growth_factor"], config["state_growth_exponent"]
        return {"type": "power_law", "factor": factor, "exponent": exponent, **limits}
    return {"type": "saturating", "limit": config["state_saturation_n"], **limits}


def memory(config: dict, mixer: str) -> dict:
    chunk = config["chunk_len"]
    if mixer == "gptalpha":
        return {"type": "full"}
    if mixer == "swa":
        window = config["swa_window_size"]
        return {"type": "sliding_window", "window": chunk if window < 0 else window}
    if mixer == "gptalpha_bswa":
        blocks, sink = config["n_bswa_chunks"], config["sink_len"]
        return {"type": "block_window", "block_size": chunk, "blocks": blocks, "sink": sink}
    parts = ["key"] if config["kvm_use_merge_gate_keys"] else []
    parts += ["value"] if config["kvm_use_merge_gate_values"] else []
    gated = config["use_overflow_v_key_weighting"] and parts
    writes = ["merge"]
    writes += ["append"] if config["kvm_apply_merge_gate_to_appends"] else []
    writes += ["initial"] if config["kvm_apply_merge_gate_to_initial_state"] else []
    return {
        "type": "kvm",
        "chunk_size": chunk,
        "window_chunks": config["n_bswa_chunks"],
        "sink": config["sink_len"],
        "budget": budget(config),
        "temperatures": "learned" if config["kvm_use_head_temps"] else "none",
        "merge_gate": "learned" if gated else "none",
        "value_scale": "radius" if config["kvm_use_vlens"] else "chunk_count",
        "gated_writes": writes,
        "gated_parts": parts or ["key", "value"],
    }


def our_config(config: dict) -> dict:
    """Keyword arguments of MeanbankConfig."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    plan = [
        {
            "memory": memory(config, config["token_mixer"]),
            "address": {"rotary_fraction": config["rope_partial_dim"] / head_dim},
        }
    ]
    if config["alt_layer_every"] > 0:
        plan.append(
            {
                "where": "even",
                "memory": memory(config, config["alt_token_mixer"]),
                "address": {"rotary_fraction": config["alt_rope_partial_dim"] / head_dim},
            }
        )
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {
        **{name: config[name] for name in names},
        "intermediate_size": int(config["hidden_size"] * config["ffn_expansion"]) // 32 * 32,
        "rope_theta": config["rope_theta"],
        "residual_scale": config["residual_scale"],
        "plan": plan,
    }
