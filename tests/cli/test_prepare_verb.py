"""`meanbank prepare`: what a run will read is built beforehand."""

import json

import pytest
import yaml

from meanbank.cli import main
from meanbank.data import prepare


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code or 0


def test_a_configuration_is_prepared_for_its_run(config_file, tmp_path, capsys, monkeypatch):
    assert run("prepare", str(config_file), "--workers", "2") == 0
    shown = capsys.readouterr().out
    assert f"files:{tmp_path}/corpus/*.txt: {tmp_path}/cache/corpora/" in shown
    assert "train: " in shown
    assert " documents, " in shown
    assert "tokens/s" in shown
    monkeypatch.setattr(prepare, "build_corpus", None)
    assert run("prepare", str(config_file)) == 0
    assert "found prepared" in capsys.readouterr().out


def test_a_source_is_prepared_with_settings(corpus, capsys, monkeypatch):
    monkeypatch.chdir(corpus)
    assert (
        run("prepare", "files:*.txt", "--set", "data.vocab_size=300", "data.max_documents=4") == 0
    )
    assert f"files:{corpus}/*.txt: " in capsys.readouterr().out
    for arguments, message in (
        (("files:none/*.txt",), "no file matches"),
        (("files:*.txt", "--set", "training.steps=4"), "settings of data only, not of training"),
        (("files:*.txt", "--set", "data.steps=4"), "steps"),
        (("files:*.txt", "--workers", "0"), "the number of workers must be"),
        (("nothing",), "there is no configuration nothing"),
    ):
        assert run("prepare", *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_run_on_a_mixture_of_documents(config_file, corpus, tmp_path, capsys):
    """Trained and evaluated; rows are pieces of one document."""
    (tmp_path / "more").mkdir()
    for number in range(9):
        (tmp_path / "more" / f"{number}.txt").write_text(f"more {number} " * 90)
    settings = yaml.safe_load(config_file.read_text())
    settings["data"]["source"] = [
        {"source": f"files:{corpus}/*.txt", "weight": 0.7},
        {"source": f"files:{tmp_path}/more/*.txt", "weight": 0.3},
    ]
    settings["data"] |= {"pack": "document", "held_out_fraction": 0.3}
    settings["training"] = {"steps": 1, "evaluation_tokens": 64}
    path = tmp_path / "mixture.yaml"
    path.write_text(yaml.safe_dump(settings))
    out = tmp_path / "run"
    assert run("train", str(path), "--out", str(out)) == 0
    assert run("evaluate", str(out), "--task", "bpb", "--set", "bpb.max_tokens=64") == 0
    told = json.loads((out / "run.json").read_text())["data"]
    assert [entry["weight"] for entry in told["source"]] == [0.7, 0.3]
    assert told["left_out_of_rows"]["tokens"] > 0
