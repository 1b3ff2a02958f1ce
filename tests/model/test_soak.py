"""A hundred thousand tokens through a memory: nothing grows but what its formula says."""

import gc
import math

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM

CHUNK, TOKENS, PIECE, LOOK = 64, 102_400, 512, 10_240  # tokens
PLANS = {
    "fixed": {"type": "kvm", "chunk_size": CHUNK, "budget": {"type": "fixed", "count": 96}},
    "growing": {"type": "kvm", "chunk_size": CHUNK, "budget": {"type": "power_law", "factor": 2}},
    "saturating": {
        "type": "ovq",
        "chunk_size": CHUNK,
        "budget": {"type": "saturating", "limit": 96},
    },
}


def rows_wanted(name: str, swallowed: int) -> int:
    """Rows after an update at which `swallowed` tokens had been seen, long after the start."""
    if name == "fixed":
        return 96
    return (
        math.floor(2 * math.sqrt(swallowed))
        if name == "growing"
        else 96 * swallowed // (96 + swallowed)
    )


def live_bytes() -> int:
    """Bytes behind all tensors of the process."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


@torch.inference_mode()
@pytest.mark.parametrize(
    "name",
    ["growing", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fixed", "saturating"))],
)
def test_a_hundred_thousand_tokens(name):
    config = MeanbankConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        plan=[{"memory": PLANS[name], "values": "bank"}],
    )
    model = MeanbankForCausalLM(config).eval()
    cache, generator = model.model.new_cache(), torch.Generator().manual_seed(1)
    row = 2 * (8 + 8 + 1) * 4  # bytes: 2 heads of key and value, and a number, fp32
    base, live = set(), set()
    for start in range(0, TOKENS, PIECE):
        ids = torch.randint(50, (1, PIECE), generator=generator)
        model(ids, cache=cache, logits_to_keep=1)
        seen = start + PIECE
        if seen % LOOK == 0:
            (rows,) = cache.describe().layers[0].rows
            assert rows == rows_wanted(name, seen - CHUNK)
            base.add(cache.nbytes() - rows * row)
            del ids
            live.add(live_bytes() - rows * row)
    assert cache.seen == TOKENS
    assert len(base) == len(live) == 1
