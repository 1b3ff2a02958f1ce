"""Evaluations against numbers that can be worked out."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import meanbank.evaluation
from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.cli.evaluate import evaluate
from meanbank.core.config import build
from meanbank.data import PackedTokens, RecallConfig, train_tokenizer
from meanbank.evaluation import (
    BigramBits,
    BitsPerByte,
    Evaluation,
    MemoryBytes,
    Parts,
    PositionLoss,
    Recall,
    Serving,
    Subject,
    TextSample,
    run_evaluation,
)
from meanbank.evaluation.losses import token_losses
from meanbank.evaluation.ruler.answers import greedy_answers
from meanbank.evaluation.serving import cost_at
from meanbank.evaluation.windows import window_starts


def make_model(vocab_size=30, memory="kvm") -> MeanbankForCausalLM:
    plan = [{"memory": {"type": memory, "chunk_size": 4} if memory == "kvm" else memory}]
    config = MeanbankConfig(
        vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        plan=plan, initialization="plain", residual_scale=1.0,
    )  # fmt: skip
    return MeanbankForCausalLM(config).eval()


def hf_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def packed(*documents: list[int]) -> PackedTokens:
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    offsets = np.cumsum([0, *(len(document) for document in documents)])
    return PackedTokens(tokens=tokens, offsets=offsets)


def subject(model, held_out=None, sizes=None, **more) -> Subject:
    corpus = SimpleNamespace(held_out=held_out, token_bytes=sizes, end_of_text_id=0)
    return Subject(name="a model", model=model, open_corpus=lambda: corpus, **more)


def results(evaluation, found: Subject) -> dict:
    return run_evaluation(evaluation, found).results


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
    result = results(BitsPerByte(sequence_length=10), subject(uniform_model(), held_out, sizes))
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
    found = subject(model, held_out, training_length=8)
    result = results(PositionLoss(multiple=4, buckets=2), found)
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
    first = results(PositionLoss(multiple=4, max_documents=1), found)
    assert first["at"]["1"]["standard_error"] is None
    # the longest document has 40 tokens: the default is 4 x 8, and 8 x 8 is refused
    assert results(PositionLoss(), found)["length"] == 32
    with pytest.raises(ValueError, match=r"no held-out document has 64 tokens .* longest has 40"):
        results(PositionLoss(multiple=8), found)


def test_recall_counts_queries():
    config = RecallConfig()
    model = make_model(config.vocab_size, "full")
    found = subject(model, recall=config)
    task = Recall(grid=((32, 4), (128, 24)), sequences=8, batch_size=3)
    outcome = run_evaluation(task, found)
    result = outcome.results
    assert [(r["length"], r["pairs"]) for r in result["grid"]] == [(32, 4), (128, 24)]
    assert result["grid"][0]["queries"] == 8 * 4
    assert result["grid"][1]["queries"] == 8 * 12
    assert all(r["accuracy"] < 0.4 for r in result["grid"])
    right = sum(record["right"] for record in outcome.records[:8])
    assert outcome.scores["recall@32/4"] == result["grid"][0]["accuracy"]
    assert result["grid"][0]["accuracy"] == pytest.approx(right / 32)
    again = Recall(grid=((32, 4), (128, 24)), sequences=8, batch_size=5)
    assert run_evaluation(again, found).prompt_hash == outcome.prompt_hash
    assert results(again, found) == result


def test_memory_of_the_papers_model():
    """KVM-sqrt16 at 120M: 12 layers of 2896 rows and 512 exact tokens, 6 heads of 128."""
    with torch.device("meta"):
        model = MeanbankForCausalLM(MeanbankConfig())
    result = results(MemoryBytes(contexts=(32769,)), subject(model))
    rows = 2896 * 6 * (128 + 128 + 1) * 4
    window = 512 * 6 * (128 + 128 + 1) * 4
    tails = (4 * 768) * 4
    assert result["contexts"][0]["bytes"] == 12 * (rows + window + tails)
    assert result["table_bytes"] == 0
    assert result["parameter_bytes"] == 4 * 162_942_096


@pytest.mark.parametrize("values", ["projection", "bank"])
def test_what_a_bank_saves_is_counted_from_caches(values):
    plan = [{"memory": "full"}, {"where": [1], "values": values}]
    config = MeanbankConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, plan=plan
    )
    result = results(MemoryBytes(contexts=(40,)), subject(MeanbankForCausalLM(config)))
    if values == "projection":
        assert result["saved"] == []
        return
    token_values, ids = 16 * 4, 4
    (saved,) = result["saved"]
    assert saved["saved"] == 40 * (token_values - ids)
    tables = 30 * 16 * 4
    assert saved["tables"] == tables == result["table_bytes"]
    share = (saved["saved"] - tables) / (3 * 40 * token_values)
    assert saved["of_values"] == pytest.approx(share)
    assert saved["of_keys_and_values"] == pytest.approx(share / 2)
    plain = MeanbankForCausalLM(
        MeanbankConfig(**{**config.to_dict(), "plan": plan[:1], "layers": None})
    )
    difference = plain.model.memory_nbytes_max(40) - result["contexts"][0]["bytes"]
    tails = 16 * 4  # of the value's token shift, which a bank layer does not have
    assert difference in (saved["saved"], saved["saved"] + tails)


@pytest.mark.parametrize("make", [make_model, hf_llama])
def test_serving_reports_what_it_did(make):
    outcome = run_evaluation(Serving(contexts=(50, 20), tokens=4), subject(make()))
    first, second = outcome.results["contexts"]
    assert (first["tokens"], second["tokens"]) == (50, 20)
    assert first["decode_tokens_per_second"] > 0
    assert first["prefill_tokens_per_second"] > 0
    assert outcome.scores["serving:bytes@50"] == first["bytes"]
    if make is hf_llama:  # keys and values of 2 layers, fp32; the last token is in it
        assert first["bytes"] == 2 * 2 * 16 * 4 * (50 + 8 + 4)


def test_losses_of_another_model_and_with_a_prefix():
    """Reading in chunks and after a prefix is what one pass over all of it gives."""
    model = hf_llama()
    tokens = torch.randint(30, (2, 25))
    rows = torch.cat([torch.tensor([[7, 3]]).expand(2, -1), tokens], dim=1)
    logits = model(rows[:, :-1]).logits.detach()
    whole = torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:], reduction="none")
    for chunk in (6, 100):
        found = token_losses(model, tokens, chunk=chunk, prefix=(7, 3))
        torch.testing.assert_close(found, whole[:, 2:], atol=1e-5, rtol=1e-5)


def test_the_bigram_baseline():
    """A corpus where each token fixes the next costs almost nothing; a random one what it must."""
    cycle = [1 + i % 5 for i in range(4000)]
    sizes = np.array([0, *([1] * 5)])
    corpus = SimpleNamespace(
        train=packed(cycle), held_out=packed(cycle[:500]), vocab_size=6, token_bytes=sizes
    )
    found = Subject(name="counts", model=make_model(), open_corpus=lambda: corpus)
    assert results(BigramBits(sequence_length=99), found)["bpb"] < 0.01
    noise = np.random.default_rng(0).integers(1, 6, 50_000).tolist()
    corpus.train, corpus.held_out = packed(noise[:40_000]), packed(noise[40_000:])
    found = Subject(name="counts", model=make_model(), open_corpus=lambda: corpus)
    result = results(BigramBits(sequence_length=99), found)
    assert result["bpb"] == pytest.approx(math.log2(5), rel=0.01)


def test_every_evaluation_is_exported_and_in_the_help():
    words = set(re.findall(r"[\w-]+", evaluate.__doc__ or ""))
    for tag, kind in Evaluation.family.items():
        if kind.__module__.startswith("meanbank."):
            assert tag in words, "name it in the help of meanbank/cli/evaluate.py"
            assert kind.__name__ in meanbank.evaluation.__all__


@pytest.mark.parametrize("evaluation", [BitsPerByte, BigramBits, Parts])
def test_windows_without_text_are_refused(evaluation):
    held_out, sizes = packed([5, 0], [6, 0]), np.array([0] * 5 + [1] * 25)
    length = {"sequence_length": 1}
    found = subject(make_model(), held_out, sizes)
    found.corpus.train, found.corpus.vocab_size = packed([5, 6, 7, 8, 0]), 30
    with pytest.raises(ValueError, match="the held-out windows hold no text"):
        run_evaluation(evaluation(**length, max_tokens=1), found)
    found.corpus.train = packed([5, 0])
    if evaluation is BigramBits:
        with pytest.raises(ValueError, match="in 4 training tokens or more, not 2"):
            run_evaluation(evaluation(**length, max_tokens=1), found)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("memory", {"contexts": []}, "contexts must be at least 1, got ()"),
        ("memory", {"contexts": [8, 0]}, "contexts must be at least 1, got (8, 0)"),
        ("memory", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ("samples", {"prompts": []}, "prompts needs at least one"),
        ("samples", {"temperature": -1.0}, "temperature must be 0 or at least 0.001, got -1.0"),
        ("samples", {"top_p": 0.0}, "top_p must be above 0"),
        ("samples", {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        *[
            (task, {"seed": seed}, f"seed must be from 0 to 2^63 - 1, got {seed}")
            for task in ("samples", "recall", "mqar", "serving")
            for seed in (-1, 2**63)
        ],
    ],
)
def test_settings_that_mean_nothing_are_refused_at_once(task, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(Evaluation, {"type": task, **settings})


@pytest.mark.parametrize("base", range(1, 10))
@pytest.mark.parametrize("multiple", [1, 2, 3, 8])
def test_loss_by_position_of_any_training_length(base, multiple):
    found = subject(uniform_model(), packed([5] * 80), training_length=base)
    evaluation = PositionLoss(multiple=multiple)
    if base * multiple == 1:
        with pytest.raises(ValueError, match="a single token has no loss"):
            run_evaluation(evaluation, found)
        return
    told = results(evaluation, found)
    rows = [*told["buckets"], *told["at"].values()]
    assert told["at"]
    assert [row["loss"] for row in rows] == pytest.approx([math.log(30)] * len(rows))


def test_more_tokens_than_a_model_has_positions_for_is_one_line():
    config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    assert token_losses(model, torch.randint(20, (2, 17))).shape == (2, 16)
    told = "takes at most 16 tokens, and 17 were to be read"
    with pytest.raises(ValueError, match=told):
        token_losses(model, torch.randint(20, (2, 18)))
    with pytest.raises(ValueError, match=told):
        greedy_answers(model, [[1] * 9, [2] * 8], [8, 8])
    with pytest.raises(ValueError, match=told):
        cost_at(model, 17)
    with pytest.raises(ValueError, match="at most 16 tokens, and 21 were"):
        run_evaluation(Serving(contexts=(8,), tokens=5), subject(model))
    text = subject(model, tokenizer=train_tokenizer(["a"], 257))
    with pytest.raises(ValueError, match=told):
        run_evaluation(TextSample(prompts=("a" * 9,), max_new_tokens=8), text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [make_model, hf_llama])
def test_losses_are_those_of_the_logits(make, dtype):
    model = make().to(dtype)
    tokens = torch.randint(30, (3, 21))
    logits = model(tokens[:, :-1]).logits.float()
    wanted = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    for chunk in (7, 20, 64):
        found = token_losses(model, tokens, chunk=chunk)
        assert found.dtype == torch.float32
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=tolerance)
    after = token_losses(model, tokens[:, 3:], prefix=tokens[0, :3].tolist())
    torch.testing.assert_close(after[0], wanted[0, 3:].detach(), rtol=0, atol=tolerance)
