"""Evaluations against numbers that can be worked out."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.data import PackedTokens, RecallConfig
from meanbank.evaluation import (
    bigram_bits_per_byte,
    bits_per_byte,
    decode_speed,
    memory_at_contexts,
    position_loss,
    recall_accuracy,
)
from meanbank.evaluation.bpb import window_starts
from meanbank.evaluation.losses import token_losses


def make_model(vocab_size=30, memory="kvm") -> MeanbankForCausalLM:
    plan = [{"memory": {"type": memory, "chunk_size": 4} if memory == "kvm" else memory}]
    config = MeanbankConfig(
        vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        plan=plan, initialization="plain", residual_scale=1.0,
    )  # fmt: skip
    return MeanbankForCausalLM(config).eval()


def packed(*documents: list[int]) -> PackedTokens:
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    offsets = np.cumsum([0, *(len(document) for document in documents)])
    return PackedTokens(tokens=tokens, offsets=offsets)


def uniform_model(vocab_size=30):
    model = make_model(vocab_size)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def test_token_losses_in_chunks_are_those_of_one_pass():
    model = make_model()
    tokens = torch.randint(30, (2, 50))
    logits = model(tokens[:, :-1]).logits.detach()
    expected = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    for chunk in (7, 16, 100):
        assert torch.allclose(token_losses(model, tokens, chunk=chunk), expected, atol=1e-5)


def test_bits_per_byte_of_a_uniform_model():
    sizes = np.array([0, *([2] * 29)])  # token 0 stands for no bytes, the others for two each
    document = [*range(1, 30), 0]
    held_out = packed(document, document)
    result = bits_per_byte(uniform_model(), held_out, sizes, sequence_length=10)
    assert result["bpb"] == pytest.approx(math.log2(30) / 2, rel=1e-6)
    assert result["nats_per_token"] == pytest.approx(math.log(30), rel=1e-6)
    assert result["windows"] == 5
    assert result["tokens"] == 50 - 1  # one end of text among the 50 targets
    assert result["bytes"] == 2 * result["tokens"]


def test_window_starts_are_spread_and_never_overlap():
    assert window_starts(101, 10, None) == list(range(0, 100, 10))
    assert window_starts(101, 10, 30) == [0, 30, 60]
    assert window_starts(101, 10, 5) == [0]
    with pytest.raises(ValueError, match="the held-out split has 10 tokens"):
        window_starts(10, 10, None)


def test_loss_by_position_takes_long_documents_from_their_start():
    model = make_model()
    generator = np.random.default_rng(0)
    long = [generator.integers(0, 30, 40).tolist() for _ in range(3)]
    held_out = packed(long[0], [1, 2, 3], long[1], long[2])
    result = position_loss(model, held_out, training_length=8, multiple=4, buckets_per_length=2)
    assert result["documents"] == 3
    assert result["length"] == 32
    losses = token_losses(model, torch.tensor([document[:32] for document in long])).double()
    at = result["at"]["2"]
    assert (at["start"], at["stop"]) == (8, 16)
    per_document = losses[:, 7:15].mean(dim=1)
    assert at["loss"] == pytest.approx(per_document.mean().item(), abs=1e-5)
    error = per_document.std().item() / 3**0.5
    assert at["standard_error"] == pytest.approx(error, abs=1e-5)
    assert [bucket["stop"] for bucket in result["buckets"]] == list(range(4, 33, 4))
    first = position_loss(model, held_out, training_length=8, multiple=4, max_documents=1)
    assert first["at"]["1"]["standard_error"] is None
    # the longest document has 40 tokens: the default is 4 x 8, and 8 x 8 is refused
    assert position_loss(model, held_out, training_length=8)["length"] == 32
    with pytest.raises(ValueError, match=r"no held-out document has 64 tokens .* longest has 40"):
        position_loss(model, held_out, training_length=8, multiple=8)


def test_recall_counts_queries():
    config = RecallConfig()
    model = make_model(config.vocab_size, "full")
    result = recall_accuracy(model, config, grid=((32, 4), (128, 24)), sequences=8)
    assert [(r["length"], r["pairs"]) for r in result["grid"]] == [(32, 4), (128, 24)]
    assert result["grid"][0]["queries"] == 8 * 4
    assert result["grid"][1]["queries"] == 8 * 12
    assert all(r["accuracy"] < 0.4 for r in result["grid"])
    again = recall_accuracy(model, config, grid=((32, 4), (128, 24)), sequences=8)
    assert again == result


def test_memory_of_the_papers_model():
    """KVM-sqrt16 at 120M: 12 layers of 2896 rows and 512 exact tokens, 6 heads of 128."""
    with torch.device("meta"):
        model = MeanbankForCausalLM(MeanbankConfig())
    result = memory_at_contexts(model, contexts=[32769])
    rows = 2896 * 6 * (128 + 128 + 1) * 4
    window = 512 * 6 * (128 + 128 + 1) * 4
    tails = (4 * 768) * 4
    assert result["contexts"][0]["bytes"] == 12 * (rows + window + tails)
    assert result["table_bytes"] == 0
    assert result["parameter_bytes"] == 4 * 162_942_096


def test_decode_speed_reports_what_it_did():
    result = decode_speed(make_model(), context=50, tokens=4)
    assert result["context"] == 50
    assert result["tokens_per_second"] > 0
    assert result["memory_bytes"] > 0


def test_the_bigram_baseline():
    """A corpus where each token fixes the next costs almost nothing; a random one what it must."""
    cycle = [1 + i % 5 for i in range(4000)]
    sizes = np.array([0, *([1] * 5)])
    corpus = SimpleNamespace(
        train=packed(cycle), held_out=packed(cycle[:500]), vocab_size=6, token_bytes=sizes
    )
    assert bigram_bits_per_byte(corpus, sequence_length=99)["bpb"] < 0.01
    noise = np.random.default_rng(0).integers(1, 6, 50_000).tolist()
    corpus.train, corpus.held_out = packed(noise[:40_000]), packed(noise[40_000:])
    result = bigram_bits_per_byte(corpus, sequence_length=99)
    assert result["bpb"] == pytest.approx(math.log2(5), rel=0.01)
