"""The command line as a user meets it: output, exit codes, errors of one line."""

import io
import json

import pytest

from meanbank.cli import main
from meanbank.training import load_config, train
from tests.conftest import write_config, write_corpus


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code or 0


def test_train_evaluate_generate(config_file, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    changes = ("--set", "training.steps=4", "data.batch_size=3", "--set", "training.seed=3")
    assert run("train", str(config_file), *changes, "--out", str(out)) == 0
    assert str(out) in capsys.readouterr().out
    assert json.loads((out / "run.json").read_text())["seed"] == 3

    settings = ("--set", "serving.contexts=[70]", "serving.tokens=2")
    assert run("evaluate", str(out), "--task", "bpb,memory,serving,samples", *settings) == 0
    shown = capsys.readouterr().out
    assert "bpb" in shown
    assert "1,048,576" in shown
    for task in ("bpb", "memory", "serving", "samples"):
        result = json.loads((out / "evaluations" / f"{task}.json").read_text())
        assert result["task"] == task
        assert result["produced_by"]["seed"] == 3
        assert result["step"] == 4
    assert run("evaluate", str(out), "--task", "bpb", "--bank-storage", "mmap") == 0
    files = (out / "evaluations" / f"{name}.json" for name in ("bpb", "bpb-mmap"))
    bpb, mapped = (json.loads(file.read_text()) for file in files)
    assert mapped["bank_storage"] == "mmap"
    assert mapped["results"] == bpb["results"]
    multiple = ("--set", "position-loss.multiple=2", "--records")
    assert run("evaluate", str(out), "--task", "position-loss", *multiple) == 0
    assert len((out / "evaluations" / "position-loss.records.jsonl").read_text().splitlines()) > 1
    assert not (out / "evaluations" / "bpb.records.jsonl").exists()
    result = json.loads((out / "evaluations" / "position-loss.json").read_text())["results"]
    assert result["length"] == 64
    assert list(result["at"]) == ["1", "2"]
    capsys.readouterr()

    assert run("generate", str(out), "--prompt", "the memory", "--max-new-tokens", "5") == 0
    text, figures = capsys.readouterr()
    assert text.startswith("the memory")
    assert "tokens/s" in figures
    assert "of memory after" in figures
    sampled = ("--temperature", "0.9", "--top-p", "0.8", "--seed", "4", "--max-new-tokens", "5")
    assert run("generate", str(out), "--prompt", "the memory", *sampled) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("the memory"))
    assert run("generate", str(out), "--prompt", "-", *sampled) == 0
    assert capsys.readouterr().out == first


def test_recall(tmp_path, capsys):
    out = str(tmp_path / "run")
    small = ("--set", "training.steps=2", "--set", "training.warmup_steps=0")
    assert run("train", "quick/recall_sqrt", *small, "--out", out) == 0
    assert run("evaluate", out, "--task", "recall", "--set", "recall.sequences=2") == 0
    assert "1,024" in capsys.readouterr().out
    assert run("evaluate", out, "--task", "bpb") == 2
    assert "has no texts" in capsys.readouterr().err
    assert run("generate", out, "--prompt", "x") == 2
    assert "not text" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A configuration and its run, for tests that change neither."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder / "small.yaml", write_corpus(folder / "corpus"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEANBANK_CACHE", str(folder / "cache"))
        yield config, train(load_config(config), folder / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.yaml"], "there is no configuration missing.yaml"),
        (
            ["train", "CONFIG", "--set", "model.plan.0.memory=kmv", "--out", "NEW"],
            "choose one of kvm",
        ),
        (["train", "CONFIG", "--set", "model.hidden_size=33", "--out", "NEW"], "not divisible"),
        (["train", "CONFIG", "--set", "data.source=files:none/*.txt", "--out", "NEW"], "none"),
        (["train", "CONFIG", "--out", "RUN"], "exists already"),
        (["train", "CONFIG", "--out", "RUN", "--resume", "--force"], "exclude each other"),
        (["train", "CONFIG", "--out", "NEW", "--resume"], "not a run folder"),
        (["evaluate", "EMPTY"], "not a run folder"),
        (["evaluate", "RUN", "--task", "bbp"], "unknown task 'bbp'; choose one of bpb"),
        (["evaluate", "RUN", "--task", "recall"], "recall needs a run"),
        (
            ["evaluate", "RUN", "--task", "position-loss", "--set", "position-loss.multiple=500"],
            "no held-out document",
        ),
        (["evaluate", "RUN", "--set", "bpb.max_tokens=0"], "must be at least 1"),
        (["evaluate", "RUN", "--task", "bpb", "--set", "bpb.maxtokens=1"], "choose one of max_tok"),
        (["evaluate", "RUN", "--task", "bpb", "--set", "recall.seed=1"], "not to be run"),
        (["evaluate", "RUN", "--task", "bpb", "--bos", "always"], "no begin-of-text token"),
        (["generate", "EMPTY", "--prompt", "x"], "not a run folder"),
        (["generate", "RUN", "--prompt", ""], "the prompt is empty"),
        (["generate", "RUN", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", "RUN", "--prompt", "x", "--top-p", "0"], "top_p"),
        (["generate", "RUN", "--prompt", "x", "--temperature", "-1"], "temperature"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, finished, tmp_path, capsys):
    config, run_folder = finished
    (tmp_path / "empty").mkdir()
    places = {
        "CONFIG": str(config),
        "RUN": str(run_folder),
        "EMPTY": str(tmp_path / "empty"),
        "NEW": str(tmp_path / "new"),
    }
    before = sorted(run_folder.rglob("*"))
    assert run(*(places.get(word, word) for word in arguments)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert errors[0].startswith("meanbank: error: ")
    assert not (tmp_path / "new").exists()
    assert sorted(run_folder.rglob("*")) == before


def test_changed_data_is_noticed(trained, corpus, capsys):
    (corpus / "more.txt").write_text("something else entirely")
    assert run("evaluate", str(trained), "--task", "bpb") == 2
    assert "has changed since it was trained" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "evaluate", "generate", "plan", "context"])
def test_help(verb, capsys):
    assert run(verb, "--help") == 0
    assert f"meanbank {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing subcommand"),
        (["trian"], "Unrecognized options: trian"),
        (["train", "quick/kvm_sqrt", "--outt", "x"], "--outt"),
        (["generate", "x"], "Missing from meanbank generate"),
        (["train", "quick/kvm_sqrt", "--out"], "Missing value for argument '--out'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert run(*arguments) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert message in errors
    assert errors.startswith("meanbank: error: ")
    assert errors.count("\n") == 1
