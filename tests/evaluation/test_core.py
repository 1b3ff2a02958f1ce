"""CORE: prompts written out, losses worked out, and what a folder may hold."""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from meanbank.data import train_tokenizer
from meanbank.evaluation.base import Evaluation, Subject
from meanbank.evaluation.continuations import Continuation, fitted, judge
from meanbank.evaluation.core_tasks import Core
from meanbank.evaluation.core_tasks.folder import STANDARD, read_tasks
from meanbank.evaluation.driver import run_evaluation
from tests.conformance.models import make_model
from tests.evaluation.core_folder import CHOICES, LANGUAGE, SCHEMA, TASKS, WORDS, make_folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS], 320)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def llama(seed=0, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3, **settings,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ours():
    torch.manual_seed(0)
    return make_model("kvm_power_law", "bank", "grouped", torch.float32, layers=2, vocab_size=320)


def losses(model, ids: list[int], judged: int) -> torch.Tensor:
    """Nats of the last `judged` tokens, read without padding."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    found = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return found[-judged:]


class Table(torch.nn.Module):
    """Logits that depend on the last token alone."""

    config, device = SimpleNamespace(), torch.device("cpu")

    def __init__(self, probabilities: torch.Tensor) -> None:
        super().__init__()
        self.table = probabilities.log()

    def forward(self, input_ids, attention_mask, use_cache, logits_to_keep):
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


def words(*names: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_the_two_rules_by_hand(tmp_path):
    """After q: a .5, b .4; after b: c .9. Sum: .5 > .4 x .9. Mean: sqrt(.36) = .6 > .5."""
    probabilities = torch.full((5, 5), 1e-3)
    q, a, b, c = 1, 2, 3, 4
    probabilities[q, a], probabilities[q, b], probabilities[b, c] = 0.5, 0.4, 0.9
    probabilities[0] = probabilities[a] = probabilities[c] = 0.2
    probabilities[:, 0] += 1 - probabilities.sum(dim=1)
    items = [{"query": "q", "choices": ["a", "b c"], "gold": gold} for gold in (0, 1, 1, 1)]
    tasks = [{**TASKS[0], "num_fewshot": 0, "continuation_delimiter": " "}]
    make_folder(tmp_path, {"a/pick.jsonl": items}, tasks)
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\narc_easy,50\n")
    subject = Subject(name="table", model=Table(probabilities), tokenizer=words(*"uqabc"))  # type: ignore
    outcome = run_evaluation(Core(folder=str(tmp_path)), subject)
    (row,) = outcome.results["tasks"]
    assert (row["accuracy_mean"], row["accuracy_sum"]) == (0.75, 0.25)
    assert (row["centred_mean"], row["centred_sum"]) == (0.5, -0.5)  # (.75 - .5) / .5
    assert (row["baseline"], row["baseline_from"]) == (0.5, "folder")
    assert outcome.scores["core"] == outcome.scores["core.folder"] == 0.5
    assert outcome.scores["core.sum"] == -0.5
    assert outcome.scores["core:arc_easy"] == 0.75
    assert outcome.scores["core.sum:arc_easy"] == 0.25
    record = outcome.records[0]
    assert record["tokens"] == [1, 2]
    assert record["losses"] == pytest.approx([-math.log(0.5), -math.log(0.36)], rel=1e-5)
    assert [r["scores"]["core:arc_easy"] for r in outcome.records].count(1.0) == 3


def test_prompts_and_losses_of_every_kind(folder, tokenizer):
    """Texts as nanochat writes them; which tokens are judged; against rows read alone."""
    model, prefix = llama(), (7,)
    subject = Subject(name="llama", model=model, tokenizer=tokenizer, prefix=prefix)
    outcome = run_evaluation(Core(folder=str(folder), batch_size=4), subject)
    by_id = {(record["task"], record["item"]): record for record in outcome.records}

    def ids(text: str) -> list[int]:
        return [*prefix, *tokenizer.encode(text).ids]

    def chosen(count: int, place: int, fewshot: int) -> tuple[int, list[int]]:
        order = list(range(count))
        random.Random(1337).shuffle(order)
        others = [i for i in range(count) if i != place]
        return order[place], [order[i] for i in random.Random(1234 + place).sample(others, fewshot)]

    for place in range(6):
        item, examples = chosen(6, place, 2)
        assert item not in examples
        head = "".join(
            f"{CHOICES[i]['query']}\nAnswer: {CHOICES[i]['choices'][i % 3]}\n\n" for i in examples
        )
        question = head + CHOICES[item]["query"] + "\nAnswer: "
        rows = [ids(question + choice) for choice in CHOICES[item]["choices"]]
        start = next(i for i in range(200) if len({row[i] for row in rows}) > 1)
        judged = [len(row) - start for row in rows]
        found = [losses(model, row, n) for row, n in zip(rows, judged, strict=True)]
        record = by_id["arc_easy", item]
        assert record["tokens"] == judged
        assert record["losses"] == pytest.approx([float(f.sum()) for f in found], rel=1e-4)
        means = [float(f.mean()) for f in found]
        assert record["right"]["mean"] == (means.index(min(means)) == item % 3)

    item, _ = chosen(4, 1, 0)
    rows = [ids(f"{context} ran away") for context in SCHEMA[item]["context_options"]]
    judged = next(n for n in range(1, 20) if rows[0][-n - 1] != rows[1][-n - 1])
    record = by_id["winograd", item]
    assert record["tokens"] == [judged, judged]
    assert judged >= len(tokenizer.encode(" ran away").ids)
    expected = [float(losses(model, row, judged).sum()) for row in rows]
    assert record["losses"] == pytest.approx(expected, rel=1e-4)

    item, (example,) = chosen(5, 2, 1)
    head = (
        f"{LANGUAGE[example]['context'].strip()} big house\n\n{LANGUAGE[item]['context'].strip()}"
    )
    row, judged = ids(head + " big house"), len(ids(head + " big house")) - len(ids(head))
    record = by_id["boolq", item]
    assert record["tokens"] == [judged]
    assert record["losses"] == pytest.approx([float(losses(model, row, judged).sum())], rel=1e-4)


def test_a_language_modeling_item_is_right_where_every_token_is_the_likeliest(tmp_path):
    table = torch.full((4, 4), 0.1)
    for word, following in ((1, 2), (2, 3), (3, 1)):
        table[word, following] = 0.7
    items = [
        {"context": "a", "continuation": continuation} for continuation in ("b c", "b c a", "b b")
    ]
    tasks = [{**TASKS[2], "num_fewshot": 0}]
    make_folder(tmp_path, {"b/end.jsonl": items}, tasks)
    subject = Subject(name="table", model=Table(table), tokenizer=words(*"uabc"))  # type: ignore
    outcome = run_evaluation(Core(folder=str(tmp_path)), subject)
    right = {record["item"]: record["right"] for record in outcome.records}
    assert right == {i: {"mean": ok, "sum": ok} for i, ok in enumerate((True, True, False))}


def test_an_answer_that_another_begins_with_keeps_a_token(tmp_path):
    table = torch.full((4, 4), 0.25)
    items = [{"query": "a", "choices": ["b", "b c"], "gold": 0}]
    tasks = [{**TASKS[0], "num_fewshot": [0], "continuation_delimiter": " "}]
    make_folder(tmp_path, {"a/pick.jsonl": items}, tasks)
    subject = Subject(name="table", model=Table(table), tokenizer=words(*"uabc"))  # type: ignore
    (record,) = run_evaluation(Core(folder=str(tmp_path)), subject).records
    assert record["tokens"] == [1, 2]


def test_no_score_depends_on_the_batch_size(folder, tokenizer):
    subject = Subject(name="ours", model=ours(), tokenizer=tokenizer, prefix=(0,))
    one, eight = (
        run_evaluation(Core(folder=str(folder), batch_size=size), subject) for size in (1, 8)
    )
    assert one.records == eight.records  # losses to the last bit
    assert one.scores == eight.scores
    assert one.prompt_hash == eight.prompt_hash


def test_count_takes_some_of_the_same_items(folder, tokenizer):
    subject = Subject(name="ours", model=ours(), tokenizer=tokenizer)
    every = run_evaluation(Core(folder=str(folder)), subject)
    some = run_evaluation(Core(folder=str(folder), count=3), subject)
    assert [row["items"] for row in some.results["tasks"]] == [3, 3, 3]
    assert all(record in every.records for record in some.records)
    other = run_evaluation(Core(folder=str(folder), count=3, seed=1), subject)
    assert other.prompt_hash != some.prompt_hash
    with pytest.raises(ValueError, match=r"count must be at least 1, got 0"):
        Core(folder=str(folder), count=0)


def test_long_prompts_are_cut_from_the_left(folder, tokenizer):
    subject = Subject(
        name="llama", model=llama(max_position_embeddings=20), tokenizer=tokenizer, prefix=(7,)
    )
    outcome = run_evaluation(Core(folder=str(folder), tasks=("arc_easy",)), subject)
    assert outcome.results["most_tokens"] == 20
    assert outcome.results["cut_items"] == 6
    assert all(record["cut"] > 0 for record in outcome.records)


def test_what_is_cut():
    row = Continuation(ids=tuple(range(10)), start=7)
    assert fitted(row, None, 1) == (row, 0)
    assert fitted(row, 9, 1) == (row, 0)  # the last token is no input
    short = Continuation(ids=(0, 5, 6, 7, 8, 9), start=3)
    assert fitted(row, 5, 1) == (short, 4)
    with pytest.raises(ValueError, match="a continuation of 3 tokens does not fit the 2 tokens"):
        fitted(row, 2, 1)


def test_equal_inputs_are_read_once():
    calls = []

    class Counting(Table):
        def forward(self, input_ids, **settings):
            calls.append(len(input_ids))
            return super().forward(input_ids, **settings)

    rows = [Continuation(ids=(1, 2, last), start=2) for last in range(4)]
    table = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 4)
    found = judge(Counting(table), rows, batch_size=8)  # type: ignore
    assert calls == [1]
    assert [f.loss for f in found] == pytest.approx([-math.log(p / 10) for p in (1, 2, 3, 4)])
    assert [f.greedy for f in found] == [False, False, False, True]


def test_what_is_covered_and_the_sets_of_baselines(folder):
    core = Core(folder=str(folder))
    records = [
        {"task": task, "right": {"mean": right, "sum": right}, "cut": 0}
        for task, rights in (
            ("arc_easy", (1, 0)),
            ("winograd", (1, 1)),
            ("boolq", (1, 0)),
        )
        for right in rights
    ]
    results = core.results(Subject(name="llama", model=llama()), records)
    assert results["covered"] == "3 of 21"
    assert len(results["missing"]) == 18
    assert results["beside"] == []
    # three choices: chance 1/3; two contexts: 1/2; boolq's published .62, a table of words 0
    arc, boolq = (0.5 - 1 / 3) / (2 / 3), (0.5 - 0.62) / 0.38
    assert results["core"]["mean"] == pytest.approx((arc + 1 + boolq) / 3)
    by_set = results["core_by_baselines"]["sum"]
    assert list(by_set) == ["dclm", "nanochat", "chance"]
    assert by_set["chance"] == pytest.approx((arc + 1 + 0.5) / 3)
    assert core.title == "core"
    assert Evaluation.family["core"] is Core


def test_the_standard_tasks():
    assert len(STANDARD) == 21
    arc = STANDARD["arc_easy"]
    assert (arc.file, arc.kind, arc.fewshot) == (
        "world_knowledge/arc_easy.jsonl", "multiple_choice", 10,
    )  # fmt: skip
    assert arc.delimiter == "\nAnswer: "
    kinds = [spec.kind for spec in STANDARD.values()]
    counts = [kinds.count(k) for k in ("multiple_choice", "schema", "language_modeling")]
    assert counts == [10, 2, 9]
    assert STANDARD["winograd"].file == "language_understanding/winograd_wsc.jsonl"


def test_folders_without_a_configuration_and_with_a_list(tmp_path):
    bare = make_folder(tmp_path / "bare", {"commonsense_reasoning/copa.jsonl": CHOICES}, tasks=[])
    assert list(read_tasks(bare, None)) == ["copa"]
    listed = make_folder(tmp_path / "listed", {"x.jsonl": CHOICES}, tasks=[])
    tasks = [
        {"task": "mine", "file": "x.jsonl", "fewshot": 5, "type": "multiple_choice"},
        {"task": "squad", "file": None, "fewshot": 10, "type": "language_modeling"},
    ]
    (listed / "tasks.json").write_text(json.dumps(tasks))
    found = read_tasks(listed, None)["mine"]
    assert (found.spec.fewshot, found.spec.delimiter) == (5, " ")
    assert Core(folder=str(listed)).loaded.keys() == {"mine"}
    bundle = make_folder(tmp_path / "bundle", {"eval_data/a/pick.jsonl": CHOICES}, TASKS)
    assert list(read_tasks(bundle, None)) == ["arc_easy"]  # the others have no file


@pytest.mark.parametrize(
    ("files", "task", "message"),
    [
        ({"a/pick.jsonl": CHOICES[:2]}, {}, r"pick.jsonl has 2 items; arc_easy needs one and 2"),
        ({"a/pick.jsonl": [{"query": "x"}]}, {}, r"line 1: 'choices' must be a list of two texts"),
        (
            {"a/pick.jsonl": [{**CHOICES[0], "gold": 3}]},
            {},
            r"line 1: 'gold' must be from 0 to 2, got 3",
        ),
        ({"a/pick.jsonl": ["x"]}, {}, r"line 1: expected an object"),
        (
            {"a/pick.jsonl": [{**CHOICES[0], "choices": ["one"], "gold": 0}]},
            {},
            r"line 1: 'choices' must be a list of two texts or more",
        ),
        ({}, {}, r"holds no file of a CORE task, such as a/pick.jsonl"),
        ({}, {"dataset_uri": "../x.jsonl"}, r"'../x.jsonl' of arc_easy is not inside"),
        ({}, {"icl_task_type": "essay"}, r"core.yaml is not a list of CORE tasks: unknown type"),
        ({}, {"num_fewshot": [-1]}, r"has -1 few-shot examples"),
    ],
)
def test_malformed_folders(tmp_path, files, task, message):
    make_folder(tmp_path, files, [{**TASKS[0], **task}])
    with pytest.raises(ValueError, match=message) as caught:
        read_tasks(tmp_path, None)
    assert "\n" not in str(caught.value)


def test_more_that_is_refused(folder):
    with pytest.raises(ValueError, match=r"unknown CORE task in .*'arc'; choose one of arc_easy"):
        read_tasks(folder, ("arc",))
    with pytest.raises(ValueError, match="no folder of CORE tasks at"):
        read_tasks(folder / "none", None)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\narc_easy,100\n")
    with pytest.raises(ValueError, match="the baseline of arc_easy must be from 0 to below 100"):
        read_tasks(folder, None)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n" + "x" * 2**18)
    with pytest.raises(ValueError, match="needs the columns 'Eval Task'"):
        read_tasks(folder, None)
    (folder / "eval_meta_data.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="needs the columns 'Eval Task'"):
        read_tasks(folder, None)
    (folder / "core.yaml").write_text("[: x")
    with pytest.raises(ValueError, match=r"core.yaml is not a list of CORE tasks: not valid YAML"):
        read_tasks(folder, None)


def test_a_diverged_model_is_wrong(tmp_path):
    tasks = [{**TASKS[0], "num_fewshot": 0, "continuation_delimiter": " "}]
    make_folder(
        tmp_path, {"a/pick.jsonl": [{"query": "a", "choices": ["b", "c"], "gold": 0}]}, tasks
    )
    table = torch.full((4, 4), math.nan)
    subject = Subject(name="table", model=Table(table), tokenizer=words(*"uabc"))  # type: ignore
    assert run_evaluation(Core(folder=str(tmp_path)), subject).scores["core:arc_easy"] == 0


def test_records_of_another_folder_are_not_used(folder, tokenizer, tmp_path):
    of = Subject(name="a model", model=ours(), tokenizer=tokenizer)
    log, evaluation = tmp_path / "log.jsonl", Core(folder=str(folder), tasks=("arc_easy",))
    before = run_evaluation(evaluation, of, log)
    path = folder / "a" / "pick.jsonl"
    items = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps({**i, "query": i["query"] + " then"}) for i in items))
    evaluation = Core(folder=str(folder), tasks=("arc_easy",))
    after = run_evaluation(evaluation, of, log)
    assert after.records != before.records
    assert after.records == run_evaluation(evaluation, of).records
