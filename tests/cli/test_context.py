"""`meanbank context` and `generate --context`."""

import random
import re

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from meanbank import MeanbankCache
from meanbank.data.text_stream import stream_tokens
from meanbank.data.tokenizer import end_of_text_id
from meanbank.evaluation import generation
from meanbank.model import MeanbankModel
from meanbank.training import load_config, load_model, train
from tests.cli.model_folders import save_model
from tests.cli.test_cli import run
from tests.conformance.models import KVM
from tests.conftest import WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plain Hugging Face folder: KVM with a bank in the last layer, and a tokenizer."""
    plan = [{"memory": KVM}, {"where": "last_third", "values": "bank"}]
    return save_model(tmp_path_factory.mktemp("models") / "small", plan)


@pytest.fixture
def book(tmp_path):
    """A text with all kinds of space between words."""
    path = tmp_path / "book.txt"
    marks = ["\n", "\n\n", "  ", "\t", " é", "…", " 12 ", "'s "]
    words = [random.Random(n).choice(WORDS + marks) for n in range(800)]
    path.write_text(" ".join(words), encoding="utf-8")
    return path


def test_build_show_and_generate(folder, book, tmp_path, capsys, monkeypatch):
    out, more = tmp_path / "book.ctx", tmp_path / "more.txt"
    more.write_text("a mean of keys")
    command = ("context", "build", folder, str(book), str(more), "--out", str(out))
    assert run(*command, "--prefill-chunk", "100") == 0
    told, errors = capsys.readouterr()
    assert "reading: done" in errors
    model, tokenizer = load_model(folder)
    texts = [
        tokenizer.encode(path.read_text(), add_special_tokens=False).ids for path in (book, more)
    ]
    ids = torch.tensor([[*texts[0], end_of_text_id(tokenizer), *texts[1]]])
    assert f"{ids.shape[1]:,} tokens" in told

    assert run("context", "show", str(out)) == 0
    told = capsys.readouterr().out
    cache = MeanbankCache.load(out, model, tokenizer=tokenizer)
    assert cache.lengths == (ids.shape[1],)
    for fact in (f"{ids.shape[1]:,}", f"{cache.nbytes():,}", "float32", "KVM", "layers.1"):
        assert fact in told
    rows = cache.layers[0].state.attention.memory.memory.rows.count
    assert re.search(rf"layers\.0\W+KVM\W+{rows}\W", told)

    passed = []
    forward = MeanbankModel.forward
    monkeypatch.setattr(
        MeanbankModel,
        "forward",
        lambda self, input_ids, **rest: (
            passed.append(input_ids.shape[1]) or forward(self, input_ids, **rest)
        ),
    )
    context = ("--context", str(out), "--max-new-tokens", "7")
    assert run("generate", folder, "--prompt", " and values", *context) == 0
    text, figures = capsys.readouterr()
    prompt = tokenizer.encode(" and values", add_special_tokens=False).ids
    assert passed[0] == len(prompt)
    assert set(passed[1:]) <= {1}, "the context was read again"
    assert f"after {ids.shape[1] + len(prompt) + len(passed) - 1} tokens" in figures
    read = generation.read_texts(model, tokenizer, [book, more], chunk=100)
    settings = generation.SamplingSettings(max_new_tokens=7)
    expected = generation.stream_text(model, tokenizer, " and values", settings, cache=read)
    assert text == f" and values{expected.text}\n"


def test_texts_are_cut_where_tokens_end(folder, book, monkeypatch):
    _, tokenizer = load_model(folder)
    monkeypatch.setattr("meanbank.data.text_stream.PIECE", 61)
    pieces = list(stream_tokens([book], tokenizer))
    assert len(pieces) > 50
    assert sum(size for _, size in pieces) == book.stat().st_size
    whole = tokenizer.encode(book.read_text(), add_special_tokens=False).ids
    assert [token for ids, _ in pieces for token in ids] == whole


def test_cuts_suit_tokenizers_that_join_punctuation_with_the_line_end(tmp_path, monkeypatch):
    pattern = r"[^\s\p{L}\p{N}]+[\r\n]*| ?\p{L}+|\s+(?!\S)|\s+|\p{N}"  # of Llama 3 and others
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    code = "".join(f"  call one(x, {n} + 2);\n\n  }}\n" for n in range(200))
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(set(code)))  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator([code], trainer)
    path = tmp_path / "code.txt"
    path.write_text(code)
    whole = tokenizer.encode(code, add_special_tokens=False).ids
    for piece in (7, 61, 500):
        monkeypatch.setattr("meanbank.data.text_stream.PIECE", piece)
        pieces = list(stream_tokens([path], tokenizer))
        assert [token for ids, _ in pieces for token in ids] == whole
        assert sum(size for _, size in pieces) == len(code)


def test_a_run_is_a_model(config_file, folder, tmp_path, capsys):
    trained = str(train(load_config(config_file, ["training.steps=2"]), tmp_path / "run"))
    text, out = tmp_path / "text.txt", str(tmp_path / "text.ctx")
    text.write_text("the memory keeps a mean")
    assert run("context", "build", trained, str(text), "--out", out) == 0
    prompt = ("--prompt", " of", "--context", out, "--max-new-tokens", "2")
    assert run("generate", trained, *prompt) == 0
    assert run("generate", folder, *prompt) == 2
    assert "another model" in capsys.readouterr().err


def test_wrong_input_is_one_line_and_leaves_no_file(folder, book, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 9)
    (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
    (tmp_path / "bad.ctx").write_bytes(b"\x00" * 100)
    context, other = tmp_path / "book.ctx", str(tmp_path / "other.ctx")
    assert run("context", "build", folder, str(book), "--out", str(context)) == 0
    capsys.readouterr()
    build = ["context", "build", folder]
    before = context.read_bytes()
    attempts = {
        "exists already": [*build, str(book), "--out", str(context)],
        "there is no text file": [*build, str(tmp_path / "missing"), "--out", other],
        "empty.txt is empty": [*build, str(book), str(tmp_path / "empty.txt"), "--out", other],
        "latin.txt is not UTF-8 text (byte 0)": [
            *build,
            str(tmp_path / "latin.txt"),
            "--out",
            other,
        ],
        "cut.txt is not UTF-8 text (byte 0)": [*build, str(tmp_path / "cut.txt"), "--out", other],
        "name at least one": [*build, "--out", other],
        "at least 1 token": [*build, str(book), "--out", other, "--prefill-chunk", "0"],
        "not a run folder": ["context", "build", str(tmp_path), str(book), "--out", other],
        "cannot read": ["context", "show", str(tmp_path / "missing")],
        "is not a file": ["context", "show", str(tmp_path)],
        "not one of ours": ["context", "show", str(tmp_path / "bad.ctx")],
        "bad.ctx": ["generate", folder, "--prompt", "a", "--context", str(tmp_path / "bad.ctx")],
        "prompt is empty": ["generate", folder, "--prompt", "", "--context", str(context)],
    }
    files = sorted(tmp_path.iterdir())
    for message, arguments in attempts.items():
        assert run(*arguments) == 2, arguments
        errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert len(errors) == 1
        assert message in errors[0]
    assert sorted(tmp_path.iterdir()) == files
    assert context.read_bytes() == before
    assert run(*build, str(book), "--out", str(context), "--force") == 0


def test_several_sequences_are_not_one_prompt(folder, tmp_path):
    model, tokenizer = load_model(folder)
    cache = model(torch.zeros(2, 5, dtype=torch.long), use_cache=True).cache
    settings = generation.SamplingSettings(max_new_tokens=2)
    with pytest.raises(ValueError, match="holds 2 sequences"):
        generation.stream_text(model, tokenizer, "a", settings, cache=cache)


@pytest.mark.parametrize("place", ["reading", "writing"])
def test_an_interruption_leaves_no_file(place, folder, book, tmp_path, capsys, monkeypatch):
    def stop(*arguments, **keywords):
        raise KeyboardInterrupt

    if place == "reading":
        monkeypatch.setattr(MeanbankModel, "forward", stop)
    else:
        monkeypatch.setattr("meanbank.core.tensor_file.check_numbers", stop)
    out = tmp_path / "contexts" / "book.ctx"
    assert run("context", "build", folder, str(book), "--out", str(out)) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "meanbank: stopped"
    assert not out.parent.exists() or not list(out.parent.iterdir())
