"""Who sees what, against rules and hand-worked cases."""

import numpy as np
import pytest

from meanbank import MeanbankConfig
from meanbank.memory import (
    KVM,
    OVQ,
    RWKV7,
    Fixed,
    Full,
    PowerLaw,
    SlidingWindow,
)
from meanbank.memory.block_window import BlockWindow
from meanbank.model.visibility import FORMS, described, visibility
from tests.conformance.models import MEMORIES

LETTERS = dict(zip(FORMS, ".-xsorm", strict=True))  # later, not seen, exact, sink, own, shared row


def config(*memories, **settings) -> MeanbankConfig:
    return MeanbankConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=len(memories),
        num_attention_heads=2,
        layers=[{"memory": memory} for memory in memories],
        **settings,
    )


def drawn(memory, tokens: int) -> list[str]:
    """A line for each query."""
    (found,) = visibility(config(memory), tokens)
    return ["".join(LETTERS[FORMS[form]] for form in row) for row in found.forms]


def test_memories_of_exact_tokens():
    assert drawn("full", 3) == ["x..", "xx.", "xxx"]
    assert drawn({"type": "sliding_window", "window": 2}, 4) == ["x...", "xx..", "-xx.", "--xx"]
    sink = {"type": "sliding_window", "window": 2, "sink": 1}
    assert drawn(sink, 5) == ["x....", "xx...", "xxx..", "s-xx.", "s--xx"]
    blocks = {"type": "block_window", "block_size": 2, "blocks": 2, "sink": 1}
    assert drawn(blocks, 6) == ["x.....", "xx....", "xxx...", "xxxx..", "s-xxx.", "s-xxxx"]
    assert drawn("rwkv7", 3) == ["m..", "mm.", "mmm"]


def test_rows_of_kvm():
    """Chunk 2, window 4: two first rows, one of them the sink, so all merge into the other."""
    memory = {"type": "kvm", "chunk_size": 2, "budget": {"type": "fixed", "count": 2}}
    assert drawn(memory, 9) == [
        "x........",
        "xx.......",
        "xxx......",
        "xxxx.....",
        "soxxx....",
        "soxxxx...",
        "srrrxxx..",
        "srrrxxxx.",
        "srrrrrxxx",
    ]
    # as many rows as tokens: every token has its own
    everything = {**memory, "budget": {"type": "power_law", "factor": 1, "exponent": 1}, "sink": 0}
    assert drawn(everything, 9)[-1] == "ooooooxxx"


def test_rows_of_ovq():
    memory = {"type": "ovq", "chunk_size": 2, "budget": {"type": "fixed", "count": 1}}
    assert drawn(memory, 5) == ["x....", "xx...", "rrx..", "rrxx.", "rrrrx"]


@pytest.mark.parametrize("name", [name for name in MEMORIES if name.startswith(("kvm", "ovq"))])
def test_rows_hold_every_token_that_left_the_window(name):
    """Nothing is lost; tokens in rows are those of whole blocks; rows are as many as held."""
    memory = MEMORIES[name]
    (found,) = visibility(config(memory), 30)
    blocks = memory.get("window_chunks", 2) if name.startswith("kvm") else 1
    for query, row in enumerate(found.forms):
        words = [FORMS[form] for form in row]
        start = max(0, (query // 4 - blocks + 1) * 4)
        assert all(word in ("sink", "own row", "shared row") for word in words[:start])
        assert words[start:] == ["exact"] * (query + 1 - start) + ["later"] * (29 - query)
        sink = memory.get("sink", 1) if name.startswith("kvm") else 0
        assert words.count("sink") == (sink if start else 0)
    singles = np.isin(found.forms[-1], [FORMS.index("sink"), FORMS.index("own row")]).sum()
    plan = config(memory).plans()[0]
    held = plan.memory.build(config(memory).geometry(plan)).held_after(30).rows
    assert singles <= held
    assert (singles == held) == (FORMS.index("shared row") not in found.forms[-1])


def test_one_entry_for_each_distinct_memory():
    window = {"type": "sliding_window", "window": 20}
    plan = config("full", window, "full", {"type": "sliding_window", "window": 6})
    found = visibility(plan)
    assert [entry.layers for entry in found] == [(0, 2), (1,), (3,)]
    # three of the longest windows, of which a state holds all but the next token
    assert {entry.forms.shape for entry in found} == {(57, 57)}
    assert [entry.layers for entry in visibility(plan, layer=2)] == [(0, 2)]
    assert visibility(config("full"))[0].forms.shape == (48, 48)
    assert visibility(config(window | {"window": 5000}), layer=0)[0].forms.shape == (1024, 1024)
    with pytest.raises(ValueError, match="there is no layer 4: the model has 4"):
        visibility(plan, layer=4)
    with pytest.raises(ValueError, match="tokens must be from 1 to 4096, got 0"):
        visibility(plan, tokens=0)


def test_memories_in_words():
    assert described(Full()) == "full"
    assert described(RWKV7()) == "rwkv7"
    assert described(SlidingWindow(window=6, sink=2)) == "sliding_window, window 6, sink 2"
    assert described(BlockWindow(block_size=4)) == "block_window, block_size 4"
    assert described(KVM(sink=0, budget=PowerLaw(factor=4.0))) == "kvm, factor 4, sink 0"
    assert described(OVQ(budget=Fixed(count=6))) == "ovq, budget fixed, count 6"
