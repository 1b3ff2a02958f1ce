"""RULER: samples that fit, can be solved from their text alone, and are the same everywhere."""

import collections
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.core.config import build, to_plain
from meanbank.data import train_tokenizer
from meanbank.evaluation import Ruler
from meanbank.evaluation.base import Evaluation, Subject, prompt_hash
from meanbank.evaluation.driver import run_evaluation
from meanbank.evaluation.ruler import TASKS
from meanbank.evaluation.ruler import evaluation as evaluation_module
from meanbank.evaluation.ruler.haystack import built_in_text, open_haystack, plain_sentences
from meanbank.evaluation.ruler.niah import DEPTHS, NIAH, NOISE
from meanbank.evaluation.ruler.scoring import any_found, averages, by_depth, rows, share_found
from meanbank.evaluation.ruler.task import first_full
from meanbank.evaluation.ruler.words import Pairs, open_words
from tests.evaluation.ruler_texts import hotpot, ruler_tokenizer, squad


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    (folder / "squad.json").write_text(json.dumps(squad()))
    (folder / "hotpot.json").write_text(json.dumps(hotpot()))
    return str(folder)


class Answering:
    """Stands for a model: knows prompts by their ids, and answers in at most the tokens it may."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=0)

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.answers = answers

    def eval(self):
        return self

    def named_modules(self):
        return []

    def generate(self, ids, attention_mask, max_new_tokens, **_):
        rows = []
        for row, mask in zip(ids, attention_mask, strict=True):
            answer = self.answers.get(prompt_hash(row[mask.bool()]), [])[:max_new_tokens]
            rows.append([*row.tolist(), *answer, *([0] * (max_new_tokens - len(answer)))])
        return torch.tensor(rows)


def subject(model=None, prefix=()) -> Subject:
    model = Answering({}) if model is None else model
    return Subject(name="test", model=model, tokenizer=ruler_tokenizer(), prefix=prefix)  # pyright: ignore[reportArgumentType]


def made(evaluation: Ruler, of: Subject | None = None) -> list:
    """(task, recipe, draft, prompt ids) of all samples."""
    of = of or subject()
    found = []
    for sample in evaluation.samples(of):
        recipe = sample.content
        task = evaluation.task(recipe.task, recipe.length)
        draft = task.made(recipe)
        found.append((task, recipe, draft, of.encode(task.prompt(draft))))
    return found


def needles_of(text: str, key: str) -> list[str]:
    return re.findall(rf"One of the special magic \w+ for {re.escape(key)} is: (\S+)\.(?=\s)", text)


def solved(name: str, text: str) -> list[str]:
    """The answer, found in the text as a reader would."""
    if name in NIAH:
        asked = re.search(r"What (?:is|are all) the special magic \w+ for (.*) mentioned", text)
        assert asked
        keys = [key.removeprefix("and ") for key in asked[1].split(", ")]
        return [value for key in keys for value in needles_of(text, key)]
    if name == "vt":
        value = re.findall(r"assigned the value (\d+)", text)[-1]
        own = text[text.rindex("Memorize and track") :]
        found, last = [], re.search(rf"VAR (\w+) = {value}", own)
        while last:
            found.append(last[1])
            last = re.search(rf"VAR (\w+) = VAR {last[1]} ", own)
        return found
    if name == "cwe":
        words = re.findall(r"\d+\. (\S+)", text.splitlines()[1])
        return [word for word, _ in collections.Counter(words).most_common(10)]
    words = text.splitlines()[0].split("coded words. ")[1].split()
    return [word for word, _ in collections.Counter(words).most_common(4) if word != "..."]


@pytest.mark.parametrize("length", [700, 4096])
def test_every_answer_is_in_the_text_and_nothing_else_is(length):
    for task, _, draft, _ in made(Ruler(lengths=(length,), count=2, seed=3)):
        assert sorted(solved(task.name, draft.text)) == sorted(draft.references), task.name


def test_an_oracle_is_always_right_and_silence_always_wrong(documents):
    evaluation = Ruler(
        tasks=TASKS, lengths=(1000, 1500), count=2, documents=documents, batch_size=3
    )
    tokenizer, answers = ruler_tokenizer(), {}
    for task, _, draft, prompt in made(evaluation):
        told = draft.references[:1] if task.best_reference else draft.references
        answers[prompt_hash(prompt)] = tokenizer.encode(" " + ", ".join(told)).ids
    right = run_evaluation(evaluation, subject(Answering(answers)))
    wrong = run_evaluation(evaluation, subject())
    names = {f"ruler:{task}@{length}" for task in TASKS for length in (1000, 1500)}
    assert right.scores == dict.fromkeys([*names, "ruler@1000", "ruler@1500"], 1.0)
    assert wrong.scores == dict.fromkeys(right.scores, 0.0)
    assert right.prompt_hash == wrong.prompt_hash
    result = json.loads(json.dumps(right.results))
    assert [row["samples"] for row in result["rows"]] == [2] * 26
    assert result["average"][0] == {"length": 1000, "score": 1.0, "tasks": 13}
    assert {row["task"] for row in result["depths"]} == set(NIAH)
    assert result["haystack"]["name"] == result["words"]["name"] == "built in"
    assert result["documents"]["qa_1"]["name"] == "squad.json"
    assert all(len(result[part]["sha256"]) == 64 for part in ("haystack", "words"))


@settings(max_examples=8, deadline=None)
@given(
    length=st.integers(450, 3000),
    seed=st.integers(0, 2**32 - 1),
    tasks=st.sets(st.sampled_from(Ruler().tasks), min_size=2, max_size=3),
    prefix=st.sampled_from([(), (5,), (5, 6, 7)]),
)
def test_prompts_fit_and_fill_the_length(length, seed, tasks, prefix):
    tasks = tuple(sorted(tasks - {"vt"} if length < 700 else tasks))  # its example alone takes 500
    of = subject(prefix=prefix)
    evaluation = Ruler(tasks=tasks, lengths=(length,), count=2, seed=seed)
    for task, recipe, draft, prompt in made(evaluation, of):
        assert prompt[: len(prefix)] == list(prefix)
        assert len(of.encode(draft.measured)) + task.output_tokens <= length
        assert len(prompt) < length - task.output_tokens / 2
        assert recipe.size >= task.least
        if task.name != "cwe":  # its example, which lm_eval leaves out, is measured
            assert len(prompt) > 0.4 * (length - task.output_tokens), task.name


@pytest.mark.parametrize("name", NIAH)
def test_needles_stand_at_their_depth(name):
    evaluation = Ruler(tasks=(name,), lengths=(1200,), count=4)
    for task, recipe, draft, _ in made(evaluation):
        context = draft.text.split("afterwards.\n", 1)[1].rsplit("\nWhat ", 1)[0]
        if NIAH[name].among == "text":
            needle = re.compile(r"One of the special magic \w+ for \S+ is: \S+?\. ?(?=[A-Z]|$)")
            places = [m.start() for m in needle.finditer(context)]
            assert len(places) == task.least
            bare = " ".join(needle.sub("", context, count=task.least).split())
            haystack = evaluation._haystack
            assert bare == " ".join(haystack.words[: recipe.size])
            asked = min(context.index(reference) for reference in draft.references)
            before = needle.sub("", context[: max(place for place in places if place < asked)])
            sentences = haystack.sentences(recipe.size)
            assert draft.depth in DEPTHS
            expected = sentences[: int(len(sentences) * (draft.depth / 100))]
            assert before.split() == " ".join(expected).split()
        else:
            lines = context.split("\n")
            (place,) = [i for i, line in enumerate(lines) if draft.references[0] in line]
            assert len(lines) == recipe.size + 1
            assert abs(100 * place / recipe.size - draft.depth) <= 100 / 39 / 2 + 0.5
            assert (lines.count(NOISE) == recipe.size) == (name == "niah_single_1")


def pinned(task: str, seed: int = 0, length: int = 900, count: int = 2) -> str:
    evaluation = Ruler(tasks=(task,), seed=seed, count=count, lengths=(length,))

    def tokens(text: str) -> int:
        return 2 * len(text.split())  # no tokenizer: the same on any machine

    made_by = evaluation.task(task, length)
    recipes = made_by.recipes(length, count, seed, tokens)
    return prompt_hash("\n".join(made_by.prompt(made_by.made(recipe)) for recipe in recipes))


PINNED = {
    "niah_single_1": "27924239052ba3db",
    "niah_single_2": "145d9e6e284dfe5d",
    "niah_single_3": "cc3104e25bef4a81",
    "niah_multikey_1": "8dc4e5b2fe53b443",
    "niah_multikey_2": "270dfcb31c48450a",
    "niah_multikey_3": "dd7387c41cb99361",
    "niah_multivalue": "5b4dd84770901ca4",
    "niah_multiquery": "7b74bf0941a148f3",
    "vt": "9f2293b8cbe93090",
    "cwe": "49aa94c5446846b3",
    "fwe": "975f2619f6b0f69c",
}


@pytest.mark.parametrize("task", Ruler().tasks)
def test_samples_are_the_same_in_every_process(task):
    assert pinned(task) == PINNED[task]
    assert len({pinned(task), pinned(task, seed=1), pinned(task, length=1300)}) == 3


def test_a_larger_count_only_adds_samples():
    def prompts(count):
        evaluation = Ruler(tasks=("niah_multikey_2", "vt"), lengths=(900,), count=count)
        found = collections.defaultdict(list)
        for task, _, _, prompt in made(evaluation):
            found[task.name].append(prompt)
        return found

    few, many = prompts(2), prompts(5)
    assert all(many[name][:2] == few[name] and len(many[name]) == 5 for name in few)
    assert len({tuple(prompt) for prompt in many["vt"]}) == 5


def tiny_model() -> MeanbankForCausalLM:
    torch.manual_seed(0)
    config = MeanbankConfig(
        vocab_size=3000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        plan=[{"memory": {"type": "kvm", "chunk_size": 16}}, {"memory": "full"}], eos_token_id=0,
    )  # fmt: skip
    return MeanbankForCausalLM(config).eval()


def test_the_batch_changes_no_record(documents):
    plain = Ruler(tasks=("qa_1", "vt"), lengths=(900,), count=3, documents=documents)
    of = subject(tiny_model())
    alone = run_evaluation(plain, of)
    together = run_evaluation(build(Evaluation, to_plain(plain) | {"batch_size": 8}), of)
    assert alone.records == together.records
    assert len({record["tokens"] for record in alone.records}) > 2  # so some were padded
    assert len({record["output"] for record in alone.records}) > 1


def test_an_answer_may_always_take_its_tokens(monkeypatch):
    """However much the words take that it begins with: here each character is a token."""
    asked = []

    def answers(model, prompts, most):
        asked.extend(most)
        return [[] for _ in prompts]

    monkeypatch.setattr(evaluation_module, "greedy_answers", answers)
    of = Subject(name="bytes", model=Answering({}), tokenizer=train_tokenizer(["a"], 257))  # pyright: ignore[reportArgumentType]
    run_evaluation(Ruler(tasks=("niah_multiquery",), lengths=(1200,), count=4), of)
    assert asked == [128] * 4


def test_any_causal_model_is_asked():
    config = LlamaConfig(
        vocab_size=3000, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    evaluation = Ruler(name="long", tasks=("fwe",), lengths=(600,), count=2, batch_size=2)
    outcome = run_evaluation(evaluation, subject(LlamaForCausalLM(config)))
    assert list(outcome.scores) == ["long:fwe@600", "long@600"]
    record = outcome.records[0]
    assert record["depth"] is None
    assert len(record["references"]) == 3
    assert record["tokens"] + 50 <= 601
    assert set(record["scores"]) == {"long:fwe@600"}


def test_answers_are_scored_as_rulers():
    assert share_found(" The numbers are\x07 12 and 34.", ["12", "34", "56", "78"]) == 0.5
    assert share_found("ABC", ["abc"]) == 1
    assert share_found("", ["abc"]) == 0
    assert any_found("in Paris, france", ["London", "Paris, France"]) == 1
    assert any_found("in Rome", ["London", "Paris"]) == 0


def test_tables_of_scores():
    def record(task, length, depth, value):
        scores = {f"ruler:{task}@{length}": value}
        return {"task": task, "length": length, "depth": depth, "tokens": 10, "scores": scores}

    records = [
        record("a", 8, 0, 1.0), record("a", 8, 0, 0.0), record("a", 8, 50, 0.5),
        record("b", 8, None, 1.0), record("b", 16, None, 0.25),
    ]  # fmt: skip
    table = rows(records)
    assert [(r["task"], r["length"], r["score"], r["samples"]) for r in table] == [
        ("a", 8, 0.5, 3), ("b", 8, 1.0, 1), ("b", 16, 0.25, 1),
    ]  # fmt: skip
    assert table[0]["standard_error"] == pytest.approx(0.5 / 3**0.5)
    assert table[1]["standard_error"] is None
    assert averages(table) == [
        {"length": 8, "score": 0.75, "tasks": 2}, {"length": 16, "score": 0.25, "tasks": 1},
    ]  # fmt: skip
    assert by_depth(records) == [
        {"task": "a", "length": 8, "depth": 0, "score": 0.5, "samples": 2},
        {"task": "a", "length": 8, "depth": 50, "score": 0.5, "samples": 1},
    ]


word = st.text(st.sampled_from("ab-"), min_size=1, max_size=4)


@given(adjectives=st.sets(word, min_size=1, max_size=6), nouns=st.sets(word, min_size=1))
def test_pairs_are_the_sorted_set(adjectives, nouns):
    expected = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert list(Pairs(adjectives, nouns)) == expected


@given(where=st.integers(0, 500), end=st.none() | st.integers(0, 500))
def test_the_first_full_one_is_found_with_few_looks(where, end):
    looked = []

    def full(number):
        looked.append(number)
        return number >= where

    found = first_full(full, end, 10_000)
    assert found == (None if end is not None and where > end else where)
    assert len(looked) <= 2 * int(np.log2(where + 2)) + 3
    assert end is None or max(looked) <= end


def test_words_and_haystack_from_files(tmp_path):
    listed = tmp_path / "words.txt"
    listed.write_text("\n".join(f"word{number:03}" for number in range(60)) + "\n\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("Two is\n here. Nobody saw it. " * 40)
    (tmp_path / "texts" / "a.txt").write_text("One came first. ")
    for haystack in (str(tmp_path / "texts"), str(tmp_path / "texts" / "*.txt")):
        evaluation = Ruler(
            tasks=("niah_single_2", "cwe"), lengths=(700,), count=1, words=str(listed),
            haystack=haystack,
        )  # fmt: skip
        needle, common = made(evaluation)
        assert "One came first. " in needle[2].text
        assert "Two is here. Nobody" in needle[2].text
        assert re.search(r"for word\d+ is: \d{7}\.", needle[2].text)
        assert all(reference.startswith("word") for reference in common[2].references)
    results = evaluation.results(subject(), [])
    assert results["words"]["name"] == "words.txt"
    assert results["haystack"]["name"] == haystack
    short = open_haystack(haystack, "plain")
    assert len(" ".join(short.sentences(1000)).split()) > 990  # it begins again


def test_sentences_end_at_full_stops():
    assert plain_sentences('He said "No!" Then 3.5 came. and went. Ok') == [
        'He said "No!"', "Then 3.5 came. and went.", "Ok",
    ]  # fmt: skip
    text = built_in_text()
    assert " ".join(plain_sentences(text)) == text
    assert not re.search(r"[0-9]", text)


def test_built_in_words_are_enough_for_any_length():
    words = open_words(None)
    assert len(words.keys) == len(set(words.keys)) > 50_000
    for least in (0, 1000, 13_000):
        assert len(set(words.listed(least))) >= least
    assert words.listed(1000)[:3] == sorted(words.listed(1000))[:3]


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"tasks": TASKS}, r"qa_1 and qa_2 need `documents`: give SQuAD's dev-v2.0.json"),
        ({"tasks": ("qa_2",)}, r"qa_2 need"),
        ({"tasks": ("niah",)}, r"unknown task of RULER 'niah'; choose one of niah_"),
        ({"tasks": ("vt", "vt")}, r"tasks must be distinct"),
        ({"lengths": ()}, r"lengths must be distinct and at least one"),
        ({"count": 0}, r"count must be at least 1, got 0"),
        ({"seed": -1}, r"seed must be at least 0"),
        ({"depths": (0, 50, 101, 3)}, r"depths must be at least 4 percentages"),
        ({"sentences": "nltk"}, r"unknown sentences 'nltk'; choose one of"),
    ],
)
def test_settings_that_cannot_be(given_settings, message):
    plain = {"type": "ruler"} | {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given_settings.items()
    }
    with pytest.raises(ValueError, match=message) as error:
        build(Evaluation, plain)
    assert "\n" not in str(error.value)


def test_what_is_supplied_must_be_usable(tmp_path, documents):
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    other = tmp_path / "other.json"
    other.write_text('{"data": 3}')
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "nothing.txt").write_text(" \n")
    for given_settings, message in [
        ({"words": str(few)}, "has 2 words; give at least 50"),
        ({"words": str(tmp_path / "none")}, "cannot read words from"),
        ({"haystack": str(empty)}, "holds no text"),
        ({"haystack": str(tmp_path / "none/*.txt")}, "no file matches"),
        ({"lengths": (64,)}, r"no sample of niah_single_2 fits 64 tokens, 128 of them"),
        ({"tasks": ("qa_1",), "documents": str(other)}, "no questions in the form of SQuAD"),
        ({"tasks": ("qa_1",), "documents": str(empty)}, "no documents at"),
        ({"tasks": ("qa_1",), "documents": f"{documents}/hotpot.json"}, "in the form of SQuAD"),
    ]:
        evaluation = Ruler(**({"tasks": ("niah_single_2",), "lengths": (700,)} | given_settings))
        with pytest.raises(ValueError, match=message) as error:
            evaluation.samples(subject())
        assert "\n" not in str(error.value)
