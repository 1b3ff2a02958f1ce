"""Evaluations of a model whose memories were changed after training."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meanbank.core.config import build, to_plain
from meanbank.data import RecallConfig, Stage
from meanbank.evaluation import Changed, Evaluation, Recall, Serving, run_evaluation
from meanbank.evaluation.base import Subject
from meanbank.evaluation.memory import MemoryBytes
from meanbank.memory import KVM, MemoryConfig
from meanbank.memory.budgets import Fixed
from tests.conformance.models import MEMORIES, make_model

GRID = ((48, 6), (32, 4))
RECALL = Recall(grid=GRID, sequences=6)
PLAIN = {**MEMORIES["kvm_power_law"], "temperatures": "none", "merge_gate": "none"}


def subject(memory="kvm_power_law", **settings) -> Subject:
    config = RecallConfig(curriculum=(Stage(fraction=1.0, length=48, pairs=(6,)),))
    given = {"vocab_size": config.vocab_size} | settings
    model = make_model(memory, "projection_gated", "grouped", torch.float32, layers=2, **given)
    return Subject(name="small", model=model, training_length=48, recall=config)


def records(outcome) -> list[dict]:
    return [{name: r[name] for name in ("prompt", "right", "asked")} for r in outcome.records]


def test_the_same_memory_gives_the_plain_evaluation():
    of = subject()
    memory = of.model.config.plans()[0].memory
    plain = run_evaluation(RECALL, of)
    same = run_evaluation(Changed(evaluation=RECALL, memory=memory, name="same"), of)
    assert records(same) == records(plain)
    assert same.prompt_hash == plain.prompt_hash
    results = dict(same.results)
    assert results.pop("change") == {"layers": [0, 1], "new": [], "dropped": []}
    assert results == plain.results
    assert same.scores == {
        name.replace("recall", "same"): value for name, value in plain.scores.items()
    }
    assert [set(r["scores"]) for r in same.records] == [{"same@48/6"}] * 6 + [{"same@32/4"}] * 6


def test_a_budget_is_that_of_a_model_made_with_it():
    of = subject()
    change = Changed(evaluation=MemoryBytes(contexts=(40,)), budget=Fixed(count=5), name="five")
    plan = [{"memory": {**MEMORIES["kvm_power_law"], "budget": {"type": "fixed", "count": 5}}}]
    small = subject(plan=plan)
    small.model.load_state_dict(of.model.state_dict(), strict=False)
    (expected,) = run_evaluation(MemoryBytes(contexts=(40,)), small).scores.values()
    outcome = run_evaluation(change, of)
    assert outcome.scores == {"five@40": expected}
    assert outcome.scores != run_evaluation(MemoryBytes(contexts=(40,)), of).scores
    assert outcome.subject.model.config.plans()[0].memory.budget == Fixed(count=5)
    assert of.model.config.plans()[0].memory.budget.tag == "power_law"
    assert outcome.subject.recall is of.recall


def test_it_goes_on_where_it_was(tmp_path):
    of, log = subject(), tmp_path / "log.jsonl"
    change = Changed(evaluation=RECALL, budget=Fixed(count=5))
    whole = run_evaluation(change, of, log, "weights")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:5]))
    assert run_evaluation(change, of, log, "weights") == whole
    assert log.read_text().splitlines(keepends=True)[:5] == lines[:5]
    other = dataclasses.replace(change, budget=Fixed(count=6))
    run_evaluation(other, of, log, "weights")
    assert log.read_text().splitlines(keepends=True)[0] != lines[0], "records of another change"


def test_layers_are_chosen_as_in_a_plan():
    plan = [{"memory": PLAIN}, {"where": [0], "memory": "rwkv7"}]
    of = subject("rwkv7", plan=plan)  # with as many key/value heads as it needs
    change = Changed(evaluation=RECALL, memory=build(MemoryConfig, PLAIN))
    assert list(change.memories(of.model)) == [1]
    assert list(Changed(evaluation=RECALL, budget=Fixed()).memories(of.model)) == [1]
    named = dataclasses.replace(change, where=(0,))
    with pytest.raises(ValueError, match="layer 0 cannot become kvm"):
        run_evaluation(named, of)
    with pytest.raises(ValueError, match="unknown place 'first_half'"):
        run_evaluation(dataclasses.replace(change, where="first_half"), of)
    budget = Changed(evaluation=RECALL, budget=Fixed(), where=(1, 0))
    with pytest.raises(ValueError, match="layer 0 has no budget to change: its memory is rwkv7"):
        run_evaluation(budget, of)


def test_settings_are_data():
    plain = {
        "type": "changed", "name": "posthoc", "memory": PLAIN, "where": [1],
        "evaluation": {"type": "recall", "sequences": 4},
    }  # fmt: skip
    made = build(Evaluation, plain)
    assert isinstance(made, Changed)
    assert (made.title, made.named.title, made.batch, made.alone) == (
        "posthoc",
        "posthoc",
        32,
        False,
    )
    assert build(Evaluation, to_plain(made)) == made
    assert Changed(evaluation=Serving(), budget=Fixed()).alone
    assert made.prompt_lengths(subject()) == Recall().prompt_lengths(subject())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give one of them"),
        ({"memory": KVM(), "budget": Fixed()}, "give one of them"),
        ({"budget": Fixed(), "evaluation": Recall(name="mine")}, "name that 'mine'"),
        (
            {"budget": Fixed(), "evaluation": Changed(evaluation=RECALL, budget=Fixed())},
            "a change of a change",
        ),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        Changed(**{"evaluation": RECALL, **settings})


def test_wrong_subjects():
    change = Changed(evaluation=RECALL, budget=Fixed())
    with pytest.raises(ValueError, match="no layer at 'all' has a memory with a budget: nothing"):
        run_evaluation(change, subject("full"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=10, num_attention_heads=1, **sizes))
    told = "memories can be changed in meanbank models only, got LlamaForCausalLM"
    with pytest.raises(ValueError, match=told):
        run_evaluation(change, Subject(name="it", model=llama))
