"""Every memory, value source and backbone, in small; what the conformance tests put together."""

import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.core.state import State

CHUNK = 4
GROWING = {"type": "power_law", "factor": 2}
KVM = {"type": "kvm", "chunk_size": CHUNK, "budget": GROWING}
MEMORIES = {
    "full": {"type": "full"},
    "sliding_window": {"type": "sliding_window", "window": 6},
    "sliding_window_sink": {"type": "sliding_window", "window": 6, "sink": 2},
    "block_window": {"type": "block_window", "block_size": CHUNK, "blocks": 2},
    "block_window_sink": {"type": "block_window", "block_size": CHUNK, "blocks": 2, "sink": 3},
    "kvm_fixed": {**KVM, "budget": {"type": "fixed", "count": 6}},
    "kvm_power_law": KVM,
    "kvm_saturating": {**KVM, "budget": {"type": "saturating", "limit": 12}},
    "kvm_three_chunks": {**KVM, "window_chunks": 3, "sink": 2},
    "kvm_one_chunk_no_gate": {
        **KVM,
        "window_chunks": 1,
        "sink": 0,
        "merge_gate": "none",
        "temperatures": "none",
    },
    "kvm_counts": {
        **KVM,
        "value_scale": "count",
        "gated_writes": ["initial", "append", "merge"],
        "gated_parts": ["value"],
    },
    "kvm_chunk_counts": {
        **KVM,
        "value_scale": "chunk_count",
        "budget": {"type": "fixed", "count": CHUNK},
    },
    "kvm_random_raw": {
        **KVM,
        "append": "random",
        "read_key": "raw",
        "stored_rotary": "zeroed_again",
    },
    "kvm_largest_gate_kept": {**KVM, "append": "gate", "stored_rotary": "kept"},
    "kvm_recent": {**KVM, "append": "recent", "merge_gate": "none"},
    "ovq": {"type": "ovq", "chunk_size": CHUNK, "budget": {"type": "saturating", "limit": 12}},
    "rwkv7": {"type": "rwkv7"},
}
SOURCES = {
    "projection": {"type": "projection"},
    "projection_gated": {"type": "projection", "residual": "gated", "shift": "learned"},
    "projection_linear": {"type": "projection", "residual": "linear"},
    "projection_plain": {"type": "projection", "residual": "none", "shift": "none"},
    "projection_scaled": {"type": "projection", "scale": "learned"},
    "first_layer": {"type": "first_layer", "layer": 0},
    "first_layer_fixed": {"type": "first_layer", "scale": "fixed"},
    "first_layer_per_head": {"type": "first_layer", "layer": 0, "scale": "per_head"},
    "initial_embedding": {"type": "initial_embedding"},
    "mixed_first_layer": {
        "type": "mixed",
        "other": {"type": "first_layer", "layer": 0, "scale": "fixed"},
    },
    "mixed_initial_embedding": {
        "type": "mixed",
        "other": {"type": "initial_embedding", "scale": "fixed"},
    },
    "mixed_bank": {
        "type": "mixed",
        "other": {"type": "bank", "scale": "fixed"},
        "coefficients": "fixed",
    },
    "gated_additive": {"type": "gated_additive"},
    "bank": {"type": "bank"},
    "bank_fixed": {"type": "bank", "scale": "fixed"},
    "bank_shared": {"type": "bank", "table": "shared"},
}
BACKBONES = ["gptalpha2", "nanochat"]
HEADS = {"heads": (4, 4), "grouped": (4, 2), "one_kv_head": (4, 1)}


def make_model(
    memory: str, source: str, heads: str, dtype: torch.dtype, layers: int = 3, **settings
):
    """A model whose layers but the first take their values from `source`."""
    torch.manual_seed(0)
    query_heads, kv_heads = HEADS["heads" if memory == "rwkv7" else heads]
    config = MeanbankConfig(
        hidden_size=24,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        **{
            "vocab_size": 40,
            "num_hidden_layers": layers,
            "value_head_dim": 6,
            "residual_scale": 1.0,
            "plan": [
                {"memory": MEMORIES[memory]},
                {"where": list(range(1, layers)), "values": SOURCES[source]},
            ],
            **settings,
        },
    )
    model = MeanbankForCausalLM(config)
    with torch.no_grad():  # start values hide what multiplies by zero
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def read(model, ids, splits):
    """Logits and the states after reading ids in pieces of the given lengths."""
    cache, logits, position = None, [], 0
    with torch.inference_mode():
        for length in splits:
            output = model(ids[:, position : position + length], cache=cache, use_cache=True)
            cache, position = output.cache, position + length
            logits.append(output.logits)
    assert position == ids.shape[1]
    return torch.cat(logits, dim=1), [layer.state for layer in cache.layers]


def assert_close(tensor, reference, tolerance):
    """Within `tolerance` of the largest entry, or absolutely where all are below 1."""
    scale = max(1.0, reference.abs().max().item())
    assert (tensor.double() - reference.double()).abs().max() <= tolerance * scale


def assert_same(found, expected, tolerance):
    logits, states = found
    wanted, wanted_states = expected
    assert (logits - wanted).abs().max() <= tolerance
    for state, reference in zip(states, wanted_states, strict=True):
        assert isinstance(state, State)
        ours, theirs = list(state.tensors()), list(reference.tensors())
        assert [t.shape for t in ours] == [t.shape for t in theirs]
        for tensor, other in zip(ours, theirs, strict=True):
            assert_close(tensor, other, tolerance)


def storage_nbytes(states) -> int:
    """Bytes of the distinct storages behind the tensors of some states, and what goes with them."""
    tensors = [t for state in states for t in (*state.tensors(), *state.derived_tensors())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
