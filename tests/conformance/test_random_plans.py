"""Any plan, any length, any split: what one pass gives, with the routes of every token.

200 plans in the ordinary suite, 20,000 with --runslow.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.memory import KVM, OVQ
from tests.conformance.models import SOURCES, assert_close

VOCABULARY = 23
BUDGETS = st.one_of(
    st.builds(lambda count: {"type": "fixed", "count": count}, st.integers(1, 24)),
    st.builds(
        lambda factor, exponent, multiple: {
            "type": "power_law",
            "factor": factor,
            "exponent": exponent,
            "multiple": multiple,
        },
        st.sampled_from([0.5, 1, 2.5]),
        st.sampled_from([0.3, 0.5, 0.8, 1]),
        st.integers(1, 3),
    ),
    st.builds(lambda limit: {"type": "saturating", "limit": limit}, st.integers(1, 24)),
)


@st.composite
def kvm(draw):
    chunk = draw(st.integers(1, 6))
    gate = draw(st.sampled_from(["learned", "none"]))
    writes = ["initial", "append", "merge"]
    appends = ["novelty", "random", "recent"] + ["gate"] * (gate == "learned")
    gated = st.lists(st.sampled_from(writes), min_size=1, unique=True)
    return {
        "type": "kvm",
        "chunk_size": chunk,
        "window_chunks": draw(st.integers(1, 3)),
        "sink": draw(st.integers(0, chunk - 1)),
        "budget": draw(BUDGETS),
        "merge_gate": gate,
        "gated_writes": draw(gated) if gate == "learned" else ["merge"],
        "temperatures": draw(st.sampled_from(["learned", "none"])),
        "value_scale": draw(st.sampled_from(["radius", "count", "chunk_count"])),
        "append": draw(st.sampled_from(appends)),
        "read_key": draw(st.sampled_from(["normalized", "raw"])),
        "stored_rotary": draw(st.sampled_from(["zeroed", "zeroed_again", "kept"])),
    }


MEMORIES = st.one_of(
    kvm(),
    kvm(),
    st.builds(
        lambda chunk, budget: {"type": "ovq", "chunk_size": chunk, "budget": budget},
        st.integers(1, 6),
        BUDGETS,
    ),
    st.sampled_from([{"type": "full"}, {"type": "rwkv7"}]),
    st.builds(
        lambda window, sink: {"type": "sliding_window", "window": window, "sink": sink},
        st.integers(1, 9),
        st.integers(0, 3),
    ),
    st.builds(
        lambda size, blocks, sink: {
            "type": "block_window",
            "block_size": size,
            "blocks": blocks,
            "sink": sink,
        },
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(0, 3),
    ),
)


@st.composite
def cases(draw):
    """A model of two layers, and two ways to cut a text."""
    memories = [draw(MEMORIES) for _ in range(2)]
    recurrent = any(memory["type"] == "rwkv7" for memory in memories)
    config = MeanbankConfig(
        backbone="gptalpha2" if recurrent else draw(st.sampled_from(["gptalpha2", "nanochat"])),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if recurrent else draw(st.sampled_from([1, 2, 4])),
        head_dim=4,
        value_head_dim=draw(st.sampled_from([3, 4])),
        residual_scale=1.0,
        plan=[
            {"where": [0], "memory": memories[0]},
            {"where": [1], "memory": memories[1], "values": draw(st.sampled_from(VALUES))},
        ],
    )
    length = draw(st.integers(1, 60))
    return config, draw(st.integers(0, 2**31)), [draw(splits(length)) for _ in range(2)]


VALUES = [
    SOURCES[name] for name in ("projection", "bank", "mixed_bank", "gated_additive", "bank_fixed")
]


@st.composite
def splits(draw, length):
    """Token by token, or pieces of any lengths."""
    if draw(st.booleans()):
        return [1] * length
    cuts = draw(st.lists(st.integers(1, length), max_size=6, unique=True).map(sorted))
    return [n for n in (b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)) if n]


@torch.inference_mode()
def read(model, ids, pieces):
    """Logits, and the cache with the provenance of every token."""
    cache = model.model.new_cache()
    cache.activate_provenance()
    logits = [model(part, cache=cache).logits for part in ids.split(pieces, dim=1)]
    return torch.cat(logits, dim=1), cache


def check(case):
    config, number, ways = case
    torch.manual_seed(number)
    model = MeanbankForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.3
    model = model.double().eval()
    length = sum(ways[0])
    ids = torch.randint(VOCABULARY, (2, length))
    wanted, whole = read(model, ids, [length])
    for pieces in ways:
        logits, cache = read(model, ids, pieces)
        for layer, plan in enumerate(config.plans()):
            if isinstance(plan.memory, (KVM, OVQ)):
                for row in range(2):
                    found = cache.provenance(layer, row).rows
                    assert torch.equal(found, whole.provenance(layer, row).rows)
        for state, other in zip(cache.layers, whole.layers, strict=True):
            ours, theirs = list(state.state.tensors()), list(other.state.tensors())
            assert [t.shape for t in ours] == [t.shape for t in theirs]
            for tensor, reference in zip(ours, theirs, strict=True):
                if tensor.numel():
                    assert_close(tensor, reference, 1e-10)
        assert_close(logits, wanted, 1e-10)
        described = dataclasses.replace(cache.describe(), layers=())
        assert described == dataclasses.replace(whole.describe(), layers=())


@settings(max_examples=200)
@given(case=cases())
def test_any_plan_and_any_split(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_other_plans(part):
    seed(part)(settings(max_examples=1000)(given(case=cases())(check)))()
