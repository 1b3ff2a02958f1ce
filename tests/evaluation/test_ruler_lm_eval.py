"""RULER's samples are those of lm_eval, for the same texts, words, seed and tokenizer."""

import bisect
import contextlib
import io
import json
import random
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from meanbank.evaluation.ruler.aggregation import CommonWords, FrequentWords
from meanbank.evaluation.ruler.documents import Documents, open_libraries
from meanbank.evaluation.ruler.haystack import Haystack, built_in_text, plain_sentences
from meanbank.evaluation.ruler.niah import DEPTHS, NIAH, NOISE, Niah
from meanbank.evaluation.ruler.task import Task
from meanbank.evaluation.ruler.tracking import Chains
from meanbank.evaluation.ruler.words import open_words
from tests.evaluation.ruler_texts import hotpot, ruler_tokenizer, squad

SEED, COUNT = 7, 5


@pytest.fixture(scope="module")
def theirs():
    """lm_eval's generators. Importing them would download NLTK's data, which is not needed here."""
    reason = "install 'lm_eval[ruler]'"
    for name in ("lm_eval", "wonderwords", "datasets"):
        pytest.importorskip(name, reason=reason)
    nltk = pytest.importorskip("nltk", reason=reason)
    names = ("prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "find", lambda *_: None)
        modules = {name: import_module(f"lm_eval.tasks.ruler.{name}") for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules["prepare_niah"], "cached_sent_tokenize", plain_sentences)
        yield SimpleNamespace(**modules, fresh=modules["cwe_utils"].RNG.getstate())


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=ruler_tokenizer())


@pytest.fixture(scope="module")
def haystack():
    return Haystack("test", built_in_text(), "plain")


@pytest.fixture(scope="module")
def words(theirs):
    return open_words("wonderwords")


def tokens(text: str) -> int:
    return len(ruler_tokenizer().encode(text, add_special_tokens=False).ids)


def ours(task: Task, length: int) -> list[tuple]:
    drafts = [task.made(recipe) for recipe in task.recipes(length, COUNT, SEED, tokens)]
    return [(draft.text, draft.lead, list(draft.references)) for draft in drafts]


def seeded(make, *arguments, **settings) -> list[tuple]:
    random.seed(SEED)
    np.random.seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        samples = make(*arguments, num_samples=COUNT, **settings)
    assert len(samples) == COUNT
    return [(sample["input"], sample["gen_prefix"], sample["outputs"]) for sample in samples]


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("name", NIAH)
def test_needles(theirs, tokenizer, haystack, words, name, length):
    needles = NIAH[name]
    their_kind = {"noise": "repeat", "text": "essay", "needles": "needle"}[needles.among]
    text = {"noise": NOISE, "text": haystack.words, "needles": theirs.prepare_niah.NEEDLE}
    expected = seeded(
        theirs.prepare_niah.generate_samples,
        text[needles.among],
        tokenizer,
        max_seq_length=length,
        template=theirs.niah_utils.TEMPLATE,
        type_haystack=their_kind,
        type_needle_k=needles.key,
        type_needle_v=needles.value,
        num_needle_k=needles.keys,
        num_needle_v=needles.values,
        num_needle_q=needles.asked,
    )
    assert ours(Niah(name, needles, words, haystack), length) == expected


def test_needles_are_what_their_tasks_hide(theirs, monkeypatch):
    """The settings of each of the eight tasks, and the noise."""
    module, seen = theirs.niah_utils, {}
    monkeypatch.setattr(module, "get_tokenizer", lambda name: None)
    monkeypatch.setattr(module, "get_haystack", lambda type_haystack: type_haystack)
    monkeypatch.setattr(module, "download_dataset", list)
    for name, needles in NIAH.items():
        calls = []
        monkeypatch.setattr(
            module, "generate_samples", lambda text, calls=calls, **given: calls.append(given)
        )
        getattr(module, name)(tokenizer="any")
        (seen[name],) = calls
        given = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1} | seen[name]
        kind = {"repeat": "noise", "essay": "text", "needle": "needles"}[given["type_haystack"]]
        assert kind == needles.among
        assert max(given["num_needle_k"], given["num_needle_q"]) == needles.keys
        assert (given["num_needle_v"], given["num_needle_q"]) == (needles.values, needles.asked)
        assert (given["type_needle_k"], given["type_needle_v"]) == (needles.key, needles.value)
    assert theirs.prepare_niah.get_haystack("repeat") == NOISE
    assert list(DEPTHS) == theirs.prepare_niah.DEPTHS


def test_keys_are_all_pairs_sorted(theirs, words):
    expected = theirs.prepare_niah.WORDS
    assert len(words.keys) == len(expected)
    assert all(words.keys[i] == expected[i] for i in range(0, len(expected), 997))
    start = bisect.bisect_left(expected, "high-")  # among them, `high-pitched-...`
    assert words.keys[start : start + 20_000] == expected[start : start + 20_000]


@pytest.mark.parametrize("length", [1200, 4096])
def test_chains(theirs, tokenizer, length):
    make, kept = theirs.vt_utils.sys_vartrack_w_noise_random, {}

    def both(tokenizer, num_samples, max_seq_length):
        kept["example"] = make(tokenizer, 1, max_seq_length=500, incremental=5)[0]
        return make(tokenizer, num_samples, max_seq_length, icl_example=kept["example"])

    expected = seeded(both, tokenizer, max_seq_length=length)
    assert ours(Chains(), length) == expected


@pytest.mark.parametrize("length", [1200, 4096])
def test_common_words(theirs, tokenizer, words, length):
    theirs.cwe_utils.RNG.setstate(theirs.fresh)
    expected = seeded(
        theirs.cwe_utils.sys_word_pair_random, tokenizer=tokenizer, max_seq_length=length
    )
    assert ours(CommonWords(words, length), length) == expected


@pytest.mark.parametrize("length", [1200, 4096])
def test_frequent_words(theirs, tokenizer, length):
    """Theirs do not leave room for the output: those are the samples of a shorter length."""
    expected = seeded(theirs.fwe_utils.sys_kwext, tokenizer, max_seq_length=length - 50)
    assert ours(FrequentWords(), length) == expected


@pytest.mark.parametrize("length", [1200, 2400])
@pytest.mark.parametrize(("name", "reader"), [("qa_1", "read_squad"), ("qa_2", "read_hotpotqa")])
def test_documents(theirs, tokenizer, monkeypatch, tmp_path, name, reader, length):
    data = {"qa_1": squad(12, 6), "qa_2": hotpot(60)}[name]
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(data))
    monkeypatch.setattr(theirs.qa_utils, "download_json", lambda url: data)
    questions, documents = getattr(theirs.qa_utils, reader).__wrapped__()
    expected = seeded(
        theirs.qa_utils.generate_samples, tokenizer, documents, questions, max_seq_length=length
    )
    assert ours(Documents(name, open_libraries(str(path))[name]), length) == expected


def test_sentences_of_punkt(theirs, tokenizer, words, monkeypatch):
    """As lm_eval is by itself, where NLTK's data is installed."""
    nltk = sys.modules["nltk"]
    try:
        nltk.sent_tokenize("One. Two.")
    except LookupError:
        pytest.skip("install NLTK's data: python -m nltk.downloader punkt_tab")
    text = 'Mr. Brown, e.g., said "Yes." Then Dr. Who came at 5 p.m. and left! Did he? ' * 400
    monkeypatch.setattr(theirs.prepare_niah, "cached_sent_tokenize", nltk.sent_tokenize)
    haystack = Haystack("test", text, "punkt")
    expected = seeded(
        theirs.prepare_niah.generate_samples,
        haystack.words,
        tokenizer,
        max_seq_length=3000,
        template=theirs.niah_utils.TEMPLATE,
        type_haystack="essay",
        type_needle_k="words",
        type_needle_v="numbers",
    )
    name = "niah_single_2"
    assert ours(Niah(name, NIAH[name], words, haystack), 3000) == expected
