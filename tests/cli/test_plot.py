"""`meanbank plot`."""

import csv

import pytest

from tests.cli.model_folders import save_model
from tests.cli.test_cli import run
from tests.conformance.models import KVM
from tests.conftest import WORDS


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS * 6), encoding="utf-8")
    return str(path)


def lines_of(path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_mask(tmp_path, capsys):
    out = tmp_path / "plots" / "mask.png"
    command = ("plot", "mask", "quick/recall_sqrt", "--out", str(out))
    assert run(*command, "--tokens", "30") == 0
    told = capsys.readouterr().out
    assert told.startswith("Layer 0 (kvm, factor 4, chunk_size 8): of 30 tokens, the last query ")
    assert told.splitlines()[-2:] == [str(out), str(out.with_suffix(".csv"))]
    assert out.read_bytes().startswith(b"\x89PNG")
    lines = lines_of(out.with_suffix(".csv"))
    assert lines[0]["form"] == "exact"
    assert lines[-1]["last"] == "29"
    assert {line["form"] for line in lines} >= {"exact", "sink", "own row"}

    assert run(*command) == 2
    error = capsys.readouterr().err
    assert f"{out} exists already: give another --out, or --force to replace it" in error
    assert run(*command, "--set", "model.plan.0.memory=full", "--force") == 0
    assert "sees 48 exactly" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "mask.svg"), "--out must be the name of a .png file, got mask.svg"),
        (("--layer", "3"), "there is no layer 3: the model has 1"),
        (("--tokens", "0"), "tokens must be from 1 to 4096, got 0"),
        (("--tokens", "99999999999999"), "tokens must be from 1 to 4096, got 99999999999999"),
    ],
)
def test_wrong_masks_are_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run("plot", "mask", "quick/recall_sqrt", *arguments) == 2
    assert capsys.readouterr().err == f"meanbank: error: {words}\n"
    assert not list(tmp_path.iterdir())


def test_memory(tmp_path, text, capsys):
    plan = [{"memory": KVM}, {"where": "last_third", "values": "bank"}]
    folder, out = save_model(tmp_path / "model", plan), tmp_path / "memory.png"
    command = ("plot", "memory", folder, "--text", text, "--out", str(out))
    assert run(*command, "--max-tokens", "40", "--head", "1") == 0
    told = capsys.readouterr().out
    assert "40 tokens of 1 sequences" in told
    assert "Layer 1 (kvm): of 40 tokens a head, 1 sink, " in told
    assert told.splitlines()[-2:] == [str(out), str(out.with_suffix(".csv"))]
    lines = lines_of(out.with_suffix(".csv"))
    assert len(lines) == 2 * 40
    assert {(line["layer"], line["head"]) for line in lines} == {("0", "1"), ("1", "1")}
    assert "".join(line["token"] for line in lines[:40]).startswith("the memory keeps a mean of")
    assert [line["fate"] for line in lines[-4:]] == ["window"] * 4
    assert {line["row"] for line in lines if line["fate"] == "window"} == {""}

    assert run(*command) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(*command, "--force", "--layer", "5") == 2
    assert "there is no layer 5: the model has 2" in capsys.readouterr().err
    assert run(*command, "--force", "--max-tokens", "0") == 2
    assert "--max-tokens must be at least 1, got 0" in capsys.readouterr().err
    missing = str(tmp_path / "none.txt")
    assert run("plot", "memory", folder, "--text", missing, "--out", str(tmp_path / "x.png")) == 2
    assert f"there is no text file {missing}" in capsys.readouterr().err


def test_a_text_that_is_none_and_one_without_end(tmp_path, monkeypatch, capsys):
    folder, out = save_model(tmp_path / "model", [{"memory": KVM}]), str(tmp_path / "x.png")
    binary, large = tmp_path / "binary.txt", tmp_path / "large.txt"
    binary.write_bytes(b"the memory \xff\x00")
    assert run("plot", "memory", folder, "--text", str(binary), "--out", out) == 2
    assert capsys.readouterr().err.endswith(f"{binary} is not UTF-8 text (byte 11)\n")
    large.write_bytes(b"the memory keeps " * 2**14 + b"\xff")
    limit = ("--max-tokens", "40", "--out", out)
    assert (
        run("plot", "memory", folder, "--text", str(large), *limit) == 0
    )  # only its start is read


def test_a_model_without_rows(tmp_path, text, capsys):
    folder = save_model(tmp_path / "model", [{"memory": "rwkv7"}])
    out = tmp_path / "memory.png"
    assert run("plot", "memory", folder, "--text", text, "--out", str(out)) == 2
    words = "meanbank: error: no layer has compressed rows to tell of; memory: rwkv7\n"
    assert capsys.readouterr().err.endswith(words)
    assert not out.exists()
