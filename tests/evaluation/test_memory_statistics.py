"""How memories are used, against a recomputation token by token."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meanbank.data import PackedTokens, RecallConfig, Stage, recall_batch
from meanbank.evaluation import MemoryStatistics, memory_statistics
from meanbank.evaluation.base import Subject
from meanbank.evaluation.driver import run_evaluation
from meanbank.evaluation.memory_statistics import layer_statistics, memories_of
from meanbank.ops import kvm_attention, ovq_attention
from tests.conformance.models import KVM, MEMORIES, make_model

SETTINGS = ["kvm_power_law", "kvm_fixed", "kvm_random_raw", "kvm_three_chunks", "kvm_counts"]


def model_of(memory):
    plan = [{"memory": memory}, {"where": [1], "values": "bank"}]
    return make_model("full", "projection", "grouped", torch.float64, layers=2, plan=plan)


def inputs_of(model, tokens) -> dict[str, torch.Tensor]:
    """What the last layer's memory is given, and its operator's arguments."""
    seen = {}

    def keep(module, arguments):
        query, key, values, x = arguments[:4]
        seen.update(query=query, key=key, value=values.dense(), x=x)

    handle = model.model.layers[1].attention.memory.register_forward_pre_hook(keep)
    model(tokens[None])
    handle.remove()
    return seen


def cosine(a, b) -> float:
    return float(a @ b / a.norm() / b.norm())


def mean(values):
    return sum(values) / len(values) if values else None


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_similarities_of_kvm(name, monkeypatch):
    """From the operator's own record of its updates, and plain loops."""
    monkeypatch.setattr(memory_statistics, "PIECE", 7)
    model, tokens = model_of(MEMORIES[name]), torch.randint(40, (45,))
    memory = model.model.layers[1].attention.memory
    given, trace = inputs_of(model, tokens), []
    kvm_attention(
        given["query"], given["key"], given["value"], memory.gates(given["x"]),
        norm_weight=memory.norm.weight, norm_bias=memory.norm.bias,
        rotary_dim=memory.geometry.rotary_dim, trace=trace, backend="reference",
        **memory.config.operator_settings(),
    )  # fmt: skip
    size = (memory.geometry.key_dim,)

    def norm(key):
        return F.layer_norm(key, size, memory.norm.weight, memory.norm.bias, 1e-5)

    def stored(key):
        key = key.clone()
        key[: memory.geometry.rotary_dim] = 0
        key = norm(key)
        if memory.config.stored_rotary == "zeroed_again":
            key[: memory.geometry.rotary_dim] = 0
        return key

    append, merge = [], []
    for update, before in zip(trace[1:], trace, strict=False):
        for head in range(2):
            keys = [stored(given["key"][0, head, update.start + i]) for i in range(4)]
            rows = list(before.rows.key[0, head])
            opened = update.appended[0, head].tolist()
            for i in opened:
                scores = [float(keys[i] @ norm(row)) for row in before.rows.key[0, head]]
                nearest = before.rows.key[0, head][scores.index(max(scores))]
                append.append(cosine(keys[i], norm(nearest)))
                rows.append(keys[i])
            merge += [
                cosine(keys[i], norm(rows[int(update.route[0, head, i])]))
                for i in range(4)
                if i not in opened
            ]
    found = layer_statistics(model, tokens)[1]
    for name_of, wanted in (("append_similarity", append), ("merge_similarity", merge)):
        expected = mean(wanted)
        assert found[name_of] == (None if expected is None else pytest.approx(expected, rel=1e-6))
    assert (name == "kvm_fixed") == (len(append) == 4)  # 6 rows, 4 of them the first ones

    counts = []
    for head in range(2):
        rows = [int(r) for update in trace for r in update.destination[0, head]]
        counts.append(Counter(rows))
    assert found["rows"] == trace[-1].rows.count
    assert found["appended"] == found["rows"] - 4
    assert found["merged"] == sum(counts[0].values()) - found["rows"]
    assert found["dead_rows"] == mean([list(c.values()).count(1) for c in counts])
    shares = [[n / sum(c.values()) for n in c.values()] for c in counts]
    effective = [math.prod(p**-p for p in share) for share in shares]
    assert found["effective_rows"] == pytest.approx(mean(effective))
    assert found["effective_rows"] <= found["rows"]


@torch.no_grad()
def test_similarities_of_ovq():
    """The dictionary moves its means chunk by chunk; key by key here."""
    model, tokens = model_of(MEMORIES["ovq"]), torch.randint(40, (23,))
    memory = model.model.layers[1].attention.memory
    given, trace = inputs_of(model, tokens), []
    ovq_attention(
        given["query"], given["key"], given["value"], memory.temperature, trace=trace,
        chunk_size=4, budget=memory.config.budget,
    )  # fmt: skip
    went = torch.cat(trace, dim=2)[0]
    append, merge = [], []
    for head in range(2):
        keys = given["key"][0, head]
        keys = keys / (keys.norm(dim=-1, keepdim=True) + 1e-5)
        rows: list[list[torch.Tensor]] = []
        for chunk in range(0, went.shape[1], 4):
            means = [torch.stack(row).mean(0) for row in rows]
            block = [(int(went[head, at]), keys[at]) for at in range(chunk, chunk + 4)]
            counts = bool(means)
            if not counts:  # the first token opens the one earlier row
                (_, first), *block = block
                means, rows = [first], [[first]]
            for row, key in block:
                if row >= len(means):
                    nearest = max(means, key=lambda m, key=key: float(m @ key))
                    append += [cosine(key, nearest)] if counts else []
                    rows += [[] for _ in range(row + 1 - len(rows))]
                else:
                    merge.append(cosine(key, means[row]))
                rows[row].append(key)
    found = layer_statistics(model, tokens)[1]
    assert found["append_similarity"] == pytest.approx(mean(append), rel=1e-6)
    assert found["merge_similarity"] == pytest.approx(mean(merge), rel=1e-6)


def subject(model, documents=(), **changes) -> Subject:
    tokens = np.array([t for d in documents for t in d], dtype=np.uint16)
    offsets = np.cumsum([0, *map(len, documents)])
    corpus = SimpleNamespace(held_out=PackedTokens(tokens=tokens, offsets=offsets))
    given = {"open_corpus": lambda: corpus, "training_length": 20} | changes
    return Subject(name="small", model=model, **given)


def test_documents():
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 40, n).tolist() for n in (30, 12, 25, 20, 40)]
    model = model_of(KVM)
    nn.init.constant_(model.model.layers[1].attention.values.scale, 0.25)
    outcome = run_evaluation(MemoryStatistics(count=3), subject(model, documents))
    results = outcome.results
    assert (results["documents"], results["length"]) == (3, 20)
    told = [layer_statistics(model, torch.tensor(documents[n][:20])) for n in (0, 2, 3)]
    for number, layer in enumerate(results["layers"]):
        assert (layer["layer"], layer["memory"]) == (number, "kvm")
        for name in ("rows", "budget", "dead_rows", "effective_rows", "merge_similarity"):
            assert layer[name] == pytest.approx(mean([t[number][name] for t in told]))
    first, last = results["layers"]
    assert (first["coefficients"], last["coefficients"]) == ({}, {"bank": 0.25})
    memory = model.model.layers[0].attention.memory
    assert first["temperatures"] == {
        "state": memory.state_temperature.tolist(), "window": memory.window_temperature.tolist()
    }  # fmt: skip
    assert outcome.scores["memory-statistics:rows"] == results["mean"]["rows"] == first["rows"]
    assert set(outcome.scores) == {f"memory-statistics:{name}" for name in memory_statistics.SCORES}


def test_short_documents_have_no_rows():
    outcome = run_evaluation(MemoryStatistics(sequence_length=8), subject(model_of(KVM), [[1] * 9]))
    layer = outcome.results["layers"][0]
    assert (layer["rows"], layer["dead_rows"], layer["effective_rows"]) == (0, 0, None)
    assert "memory-statistics:effective_rows" not in outcome.scores


def test_recall_sequences():
    config = RecallConfig(
        curriculum=(
            Stage(fraction=0.5, length=32, pairs=(4,)),
            Stage(fraction=0.5, length=48, pairs=(6,)),
        )
    )
    model = make_model(
        "kvm_power_law", "projection", "grouped", torch.float32, layers=2,
        vocab_size=config.vocab_size,
    )  # fmt: skip
    told = subject(model, training_length=None, open_corpus=None, recall=config)
    results = run_evaluation(MemoryStatistics(count=2), told).results
    assert (results["documents"], results["length"]) == (2, 48)
    expected = []
    for number in range(2):
        generator = torch.Generator().manual_seed(1_000_000 + number)
        ids = recall_batch(generator, 1, 48, 6, config).input_ids[0]
        expected.append(layer_statistics(model, ids)[0]["dead_rows"])
    assert results["layers"][0]["dead_rows"] == mean(expected)


def test_wrong_subjects_and_settings():
    full = make_model("full", "projection", "grouped", torch.float32, layers=1)
    with pytest.raises(ValueError, match="no layer of small has compressed rows"):
        run_evaluation(MemoryStatistics(), subject(full))
    with pytest.raises(ValueError, match="memories are known of meanbank models only, got Linear"):
        memories_of(nn.Linear(2, 2))
    small = model_of(KVM)
    with pytest.raises(ValueError, match="no held-out document has 20 tokens, the longest has 9"):
        run_evaluation(MemoryStatistics(), subject(small, [[1] * 9]))
    with pytest.raises(ValueError, match="training length of small; set sequence_length"):
        run_evaluation(MemoryStatistics(), subject(small, [[1] * 9], training_length=None))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        MemoryStatistics(count=0)
