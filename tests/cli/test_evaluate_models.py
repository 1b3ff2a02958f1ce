"""`meanbank evaluate` on a model of another library's classes."""

import json

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from meanbank.cli import main
from meanbank.cli.evaluate import print_result
from meanbank.cli.tables import table
from tests.cli.model_folders import save_llama
from tests.conformance.models import make_model


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


@pytest.fixture
def llama(tmp_path, corpus):
    return save_llama(tmp_path / "llama", corpus)


def test_any_causal_language_model_is_evaluated(llama, corpus, tmp_path, capsys):
    out = tmp_path / "results"
    source = f"files:{corpus}/*.txt"
    tasks = ("--task", "bpb,position-loss,serving,samples", "--set", "serving.contexts=[20]")
    places = ("--data", source, "--out", str(out))
    assert run("evaluate", str(llama), *tasks, *places) == 0
    assert "nats per token" in capsys.readouterr().out
    results = {task: json.loads((out / f"{task}.json").read_text()) for task in
               ("bpb", "position-loss", "serving", "samples")}  # fmt: skip
    assert results["bpb"]["scores"]["bpb"] > 0
    assert results["bpb"]["data"]["source"] == source
    assert results["bpb"]["config"]["model_type"] == "llama"
    assert results["bpb"]["prompt_hash"]
    assert results["position-loss"]["results"]["training_length"] == 60
    costs = results["position-loss"]["costs"]  # keys and values of 2 layers, 16 channels, fp32
    assert [cost["tokens"] for cost in costs] == [60, 120, 240]
    assert [cost["bytes"] for cost in costs] == [n * 2 * 2 * 16 * 4 for n in (60, 120, 240)]
    assert "none" in results["bpb"]["bos_policy"]
    assert run("evaluate", str(llama), "--task", "bpb", *places, "--bos", "always") == 0
    after_bos = json.loads((out / "bpb.json").read_text())
    assert "[5]" in after_bos["bos_policy"]
    assert after_bos["scores"] != results["bpb"]["scores"]


def test_what_is_not_safetensors_is_not_loaded(llama, tmp_path, capsys):
    model = LlamaForCausalLM.from_pretrained(llama)
    (llama / "model.safetensors").unlink()
    torch.save(model.state_dict(), llama / "pytorch_model.bin")
    assert run("evaluate", str(llama), "--task", "serving", "--out", str(tmp_path / "x")) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "safetensors" in errors[-1]
    assert errors[-1].startswith("meanbank: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["LLAMA"], "name what to evaluate"),
        (["LLAMA", "--task", "recall"], "recall needs a run"),
        (["LLAMA", "--task", "bpb"], "has no texts"),
        (["LLAMA", "--task", "memory"], "not a model of meanbank"),
        (["LLAMA", "--task", "serving", "--bank-storage", "mmap"], "is for runs"),
        (["NOTHING"], "not a run folder"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, llama, tmp_path, capsys):
    places = {"LLAMA": str(llama), "NOTHING": str(tmp_path / "nothing")}
    out = tmp_path / "results"
    words = [places.get(word, word) for word in arguments]
    assert run("evaluate", *words, "--out", str(out)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert not out.exists()


def test_what_users_and_models_write_is_no_markup(capsys):
    text = "[/] [red]b[/red] \x1b[2J \ud800"
    result = {"name": text, "costs": [], "results": {"samples": [{"prompt": text, "[/x]": 1}]}}
    print_result(result)
    Console().print(table(text, [text, "[/x]"], [(text, 1.5)]))
    shown = capsys.readouterr().out
    assert shown.count("[/] [red]b[/red]") == 5
    assert shown.count("[/x]") == 2
    assert "\x1b[2J" not in shown


def test_a_table_has_every_rows_columns_and_nothing_nested(capsys):
    rows = [{"length": 8, "found": 0.5, "parts": [1]}, {"length": 16, "more": 7, "parts": {"a": 1}}]
    costs = [{"tokens": 8, "bytes": 1024, "prefill_tokens_per_second": 2.0}]
    print_result({"name": "task", "costs": costs, "results": {"rows": rows}})
    title, _, columns, _, first, second, _ = capsys.readouterr().out.splitlines()
    assert title.strip() == "task"
    words = [cell.strip() for cell in columns.strip("┃ ").split("┃")]
    assert words == ["length", "found", "bytes held", "tokens/s", "more"]
    cells = [[c.strip() for c in line.strip("│ ").split("│")] for line in (first, second)]
    assert cells == [["8", "0.5", "1,024", "2", "-"], ["16", "-", "-", "-", "7"]]


def test_weights_of_ours_that_are_not_safetensors_are_not_loaded(tmp_path, capsys):
    model = make_model("full", "projection", "grouped", torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert run("generate", str(tmp_path), "--prompt", "x") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("meanbank: error: ") and "safetensors" in error


def test_settings_may_be_given_one_by_one(llama, tmp_path):
    out = tmp_path / "x"
    settings = ("--set", "serving.contexts=[16]", "--set", "serving.tokens=2")
    assert run("evaluate", str(llama), "--task", "serving", "--out", str(out), *settings) == 0
    found = json.loads((out / "serving.json").read_text())["settings"]
    assert (found["contexts"], found["tokens"]) == ([16], 2)
