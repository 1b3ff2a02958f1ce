"""lm_eval through its API: its own numbers, and ours beside them."""

import json
import sys

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from meanbank.data import train_tokenizer
from meanbank.data.tokenizer import END_OF_TEXT
from meanbank.evaluation import Core, Harness
from meanbank.evaluation.base import Evaluation, Subject
from meanbank.evaluation.driver import run_evaluation
from meanbank.evaluation.harness_tasks import wrapped_tokenizer
from tests.conformance.models import make_model
from tests.evaluation.core_folder import TASKS, WORDS, make_folder

THINGS = ["tea", "a hat", "milk", "ten cats", "one hat", "water", "a dog", "the owl"]
ITEMS = [
    {
        "query": f"the price of {thing} in the {place} is",
        "choices": ["one", "two hundred", "big"],
        "gold": (i + j) % 3,
    }
    for i, thing in enumerate(THINGS)
    for j, place in enumerate(("house", "hat", "world"))
]


@pytest.fixture(scope="module")
def lm_eval():
    module = pytest.importorskip("lm_eval", reason="pip install 'meanbank[eval]'")
    with pytest.MonkeyPatch.context() as patch:  # it asks pip and conda, for seconds
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        yield module


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS], 320)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two tasks: one to choose, one whose continuation is scored; all data is local."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{query}}",
        "target_delimiter": " ",
        "metadata": {"version": 3.0},
    }
    choice = {
        **common,
        "task": "toy_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    ending = {
        **common,
        "task": "toy_ending",
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[gold]}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity", "aggregation": "mean"}],
    }
    for task in (choice, ending):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return tmp_path


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_reference_model_gets_lm_evals_own_numbers(lm_eval, folder, tokenizer):
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    names, model = ("toy_choice", "toy_ending"), llama()
    settings = {"num_fewshot": 2, "limit": 20}
    evaluation = Harness(tasks=names, include_path=str(folder), batch_size=4, seed=5, **settings)
    outcome = run_evaluation(evaluation, Subject(name="llama", model=model, tokenizer=tokenizer))

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    direct = [
        lm_eval.simple_evaluate(
            HFLM(pretrained=model, tokenizer=wrapped, batch_size=4),
            tasks=[name],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            **dict.fromkeys(seeds, 5),
            **settings,
        )
        for name in names
    ]
    expected = {name: dict(d["results"][name]) for name, d in zip(names, direct, strict=True)}
    assert outcome.results["lm_eval"]["results"] == expected
    assert outcome.results["lm_eval_version"] == lm_eval.__version__
    assert outcome.results["lm_eval"]["versions"] == {"toy_choice": 3.0, "toy_ending": 3.0}
    choice = expected["toy_choice"]
    assert 0 < choice["acc,none"] < 1
    assert outcome.scores["harness:toy_choice"] == choice["acc,none"]
    assert outcome.scores["harness:toy_choice:acc_norm"] == choice["acc_norm,none"]
    mean = expected["toy_ending"]["perplexity,none"]  # of log-likelihoods: it would show any bit
    assert outcome.scores["harness:toy_ending:perplexity"] == mean < 0
    row = outcome.results["tasks"][0]
    assert (row["task"], row["metric"], row["filter"]) == ("toy_choice", "acc", "none")
    assert row["stderr"] == choice["acc_stderr,none"]
    assert (row["fewshot"], row["documents"]) == (2, 20)
    logged = {d["doc_id"]: d["acc"] for d in direct[0]["samples"]["toy_choice"]}
    kept = {d["id"]: d["acc"] for d in outcome.records[0]["documents"]["toy_choice"]}
    assert kept == logged
    json.dumps([outcome.results, outcome.records], allow_nan=False)


def test_our_rule_of_sums_is_lm_evals_accuracy(lm_eval, folder, tokenizer):
    """The same items and prompts: every one right or wrong alike."""
    core = make_folder(
        folder / "core",
        {"items.jsonl": ITEMS},
        [{**TASKS[0], "dataset_uri": "items.jsonl", "num_fewshot": [0],
          "continuation_delimiter": " "}],
    )  # fmt: skip
    for model in (llama(), ours()):
        subject = Subject(name="model", model=model, tokenizer=tokenizer)
        harness = run_evaluation(Harness(tasks=("toy_choice",), include_path=str(folder)), subject)
        found = run_evaluation(Core(folder=str(core)), subject)
        theirs = {d["id"]: d["acc"] == 1 for d in harness.records[0]["documents"]["toy_choice"]}
        assert {r["item"]: r["right"]["sum"] for r in found.records} == theirs
        assert found.scores["core.sum:arc_easy"] == harness.scores["harness:toy_choice"]
        assert 0 < sum(theirs.values()) < len(ITEMS)


def ours():
    torch.manual_seed(1)
    return make_model("kvm_power_law", "bank", "grouped", torch.float32, layers=2, vocab_size=320)


def test_batch_sizes_give_the_same_numbers(lm_eval, folder, tokenizer):
    subject = Subject(name="ours", model=ours(), tokenizer=tokenizer)
    one, eight = (
        run_evaluation(
            Harness(tasks=("toy_choice",), include_path=str(folder), batch_size=size), subject
        )
        for size in (1, 8)
    )
    assert one.scores == eight.scores
    assert one.records[0]["documents"] == eight.records[0]["documents"]


def test_the_prefix_comes_before_every_prompt(lm_eval, folder, tokenizer):
    asked = []
    model = llama()

    class Watched(LlamaForCausalLM):
        def forward(self, input_ids, *arguments, **settings):
            asked.append(input_ids)
            return super().forward(input_ids, *arguments, **settings)

    model.__class__ = Watched
    for prefix in ((), (5,), (5, 9)):
        subject = Subject(name="llama", model=model, tokenizer=tokenizer, prefix=prefix)
        asked.clear()
        run_evaluation(Harness(tasks=("toy_choice",), include_path=str(folder), limit=3), subject)
        expected = {tuple(subject.encode(item["query"])[: len(prefix) + 4]) for item in ITEMS[:3]}
        assert {tuple(row[: len(prefix) + 4].tolist()) for ids in asked for row in ids} == expected


def test_the_wrapped_tokenizer(tokenizer):
    text = "the price of tea <|endoftext|> is"
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    price = tokenizer.encode("the price").ids
    assert wrapped_tokenizer(tokenizer).encode("the price") == price
    wrapped = wrapped_tokenizer(tokenizer, (5, 9))
    assert wrapped.encode("the price") == [5, 9, *price]
    assert wrapped.encode("the price", add_special_tokens=False) == price
    assert tokenizer.encode(text).ids == plain  # the subject's own is as it was


def test_what_is_refused(lm_eval, folder, tokenizer):
    subject = Subject(name="llama", model=llama(), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no folder of tasks at"):
        run_evaluation(Harness(tasks=("x",), include_path=str(folder / "none")), subject)
    with pytest.raises(ValueError, match="needs distinct names"):
        Harness(tasks=())
    assert Evaluation.family["harness"] is Harness


def test_lm_eval_is_asked_for_where_it_is_missing(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    subject = Subject(name="llama", model=llama(), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"pip install 'meanbank\[eval\]'"):
        run_evaluation(Harness(tasks=("toy",)), subject)


def test_the_wrapped_tokenizer_reads_special_text_as_text():
    tokenizer = train_tokenizer([WORDS], 320)
    wrapped = wrapped_tokenizer(tokenizer)
    text = f"a{END_OF_TEXT}b"
    wanted = tokenizer.encode(text, add_special_tokens=False).ids
    assert wrapped(text, add_special_tokens=False)["input_ids"] == wanted
    assert wrapped.eos_token_id not in wanted
