"""Closed-form FLOPs against what PyTorch counts.

Token by token nothing is masked, so the counter sees exactly the rows that each query is shown.
"""

import dataclasses
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.core.flops import Flops, linear_flops, products
from meanbank.core.geometry import Geometry
from meanbank.memory import OVQ, BlockWindow, Full, SlidingWindow
from meanbank.memory.kvm import KVM, KeyValueMeans
from meanbank.model.accounting import flops_by_part, papers_flops_by_part
from meanbank.model.attention import SoftmaxAttention
from tests.conformance.models import MEMORIES, SOURCES
from tests.counting import flop_counter

TOKENS = 17
CASES = sorted(
    {
        *itertools.product(["gptalpha2"], MEMORIES, ["projection"], ["all"]),
        *itertools.product(["gptalpha2"], ["full", "rwkv7"], SOURCES, ["all"]),
        *itertools.product(["nanochat"], ["kvm_power_law"], SOURCES, ["last_two_thirds"]),
    }
)


def make_model(backbone: str, memory: str, source: str, where: str) -> MeanbankForCausalLM:
    plan = [{"memory": MEMORIES[memory]}, {"where": where, "values": SOURCES[source]}]
    return model_of(plan, backbone, kv_heads=4 if memory == "rwkv7" else 2)


def model_of(plan: list[dict], backbone: str, kv_heads: int) -> MeanbankForCausalLM:
    torch.manual_seed(0)
    config = MeanbankConfig(
        backbone=backbone,
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        value_head_dim=6,
        plan=plan,
    )
    return MeanbankForCausalLM(config)


def linear_maps(counter: FlopCounterMode) -> int:
    """FLOPs of products of matrices, which are linear maps: attention multiplies batches."""
    return counter.get_flop_counts()["Global"].get(torch.ops.aten.mm, 0)


@pytest.mark.parametrize(("backbone", "memory", "source", "where"), CASES)
def test_flops_are_those_of_the_model(backbone, memory, source, where):
    check(make_model(backbone, memory, source, where))


@pytest.mark.parametrize("memory", ["full", pytest.param("rwkv7", marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", SOURCES)
def test_published_values_of_a_later_layer_are_counted(source, memory):
    plan = [
        {"memory": "block_window"},
        {"where": [1, 2], "memory": MEMORIES[memory]},
        {"where": [1], "values": _reading(SOURCES[source], 0)},
        {"where": [2], "values": {"type": "first_layer", "layer": 1}},
    ]
    check(model_of(plan, "gptalpha2", kv_heads=4))


def _reading(source, layer: int):
    """The source, which reads that layer where it reads one."""
    if source["type"] == "first_layer":
        return {**source, "layer": layer}
    if source["type"] == "mixed" and source["other"]["type"] == "first_layer":
        return {**source, "other": {**source["other"], "layer": layer}}
    return source


def check(model: MeanbankForCausalLM) -> None:
    """Raise AssertionError unless PyTorch counts the same for a sequence.

    Of KVM what its specification does: a backend may read spare slots along.
    """
    for module in model.modules():
        if isinstance(module, KeyValueMeans):
            module.config = dataclasses.replace(module.config, backend="reference")
    parts = flops_by_part(model, TOKENS)
    ids = torch.randint(40, (1, TOKENS))

    cache = None
    with flop_counter() as counter, torch.no_grad():
        for token in ids.split(1, dim=1):
            cache = model(token, cache=cache, use_cache=True).cache
    assert counter.get_total_flops() == sum(part.forward for part in parts.values())

    linear = sum((flops for name, flops in parts.items() if name != "attention"), Flops())
    for block in model.model.layers:
        attention = block.attention
        if isinstance(attention, SoftmaxAttention) and isinstance(attention.memory, KeyValueMeans):
            gate = attention.memory.gate  # counted as attention
            linear += Flops() if gate is None else linear_flops(gate, TOKENS)
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, labels=ids, use_cache=False).loss
    assert linear_maps(counter) == linear.forward
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert linear_maps(counter) == linear.backward


@pytest.mark.parametrize(
    ("memory", "visible"),
    [
        (Full(), lambda query, key: True),
        (SlidingWindow(window=5), lambda query, key: key > query - 5),
        (SlidingWindow(window=5, sink=3), lambda query, key: key > query - 5 or key < 3),
        (BlockWindow(block_size=4, blocks=2), lambda query, key: key // 4 >= query // 4 - 1),
        (
            BlockWindow(block_size=4, blocks=3, sink=2),
            lambda query, key: key // 4 >= query // 4 - 2 or key < 2,
        ),
        # while the window sees everything there is nothing else
        (KVM(chunk_size=8, window_chunks=4), lambda query, key: True),
        (OVQ(chunk_size=32), lambda query, key: True),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 12, 31])
def test_visible_pairs(memory, visible, tokens):
    sizes = Geometry(
        hidden_size=32, num_heads=6, num_kv_heads=2, key_dim=8, value_dim=5, rotary_dim=4
    )
    pairs = sum(visible(query, key) for query in range(tokens) for key in range(query + 1))
    built = memory.build(sizes)
    forward = 2 * pairs * 6 * (8 + 5)
    expected = Flops(forward, 2 * forward)
    if isinstance(memory, KVM):
        expected += linear_flops(built.gate, tokens)
    assert built.flops(tokens) == expected


def test_writes_have_no_backward_pass():
    sizes = Geometry(
        hidden_size=32, num_heads=2, num_kv_heads=2, key_dim=8, value_dim=8, rotary_dim=4
    )
    config = KVM(chunk_size=4, window_chunks=2, merge_gate="none")
    memory = config.build(sizes)
    # updates at 8 (the first chunk, copied) and 12, when all four tokens meet 4 + 4 rows
    assert list(memory.schedule(13)) == [(8, 4), (12, 8)]
    written = 2 * (4 * 8) * 2 * 8
    one_more = memory.flops(13).forward - memory.flops(12).forward
    read = 2 * (8 + 5) * 2 * (8 + 8)
    assert one_more == written + read
    assert memory.flops(13).backward - memory.flops(12).backward == 2 * read
    by_gate = dataclasses.replace(config, merge_gate="learned", append="gate", gated_writes=())
    assert by_gate.build(sizes).flops(13).backward == memory.flops(13).backward


def test_arithmetic():
    assert products(3) == Flops(6, 12)
    assert products(3, learns=False) == Flops(6, 0)
    assert 2 * (Flops(1, 2) + Flops(3, 4)) == Flops(8, 12) == Flops(4, 6) * 2
    assert Flops(1, 2).total == 3


def test_papers_count_what_ours_counts_but_whole_windows():
    model = make_model("gptalpha2", "kvm_power_law", "mixed_initial_embedding", "last_two_thirds")
    ours, theirs = flops_by_part(model, TOKENS), papers_flops_by_part(model, TOKENS)
    for part in ("MLP", "head"):
        assert ours[part] == theirs[part]
    rwkv7 = make_model("gptalpha2", "rwkv7", "projection", "all")
    assert flops_by_part(rwkv7, 8)["attention"] == papers_flops_by_part(rwkv7, 8)["attention"]
    # 3 layers, 4 heads of 8 x 6: S kk, two outer products and S r, 2 FLOPs a number each
    assert flops_by_part(rwkv7, 8)["attention"].forward == 3 * 8 * 4 * (4 * 2 * 8 * 6)
