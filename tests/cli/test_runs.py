"""`meanbank runs`: states of runs, and the curves of one."""

import fcntl
import json

import pytest

from meanbank.training import load_config, train
from meanbank.training.overview import find_runs, state_of
from tests.cli.test_cli import run


@pytest.fixture
def trained(config_file, tmp_path, capsys):
    path = train(load_config(config_file), tmp_path / "runs" / "deep" / "small")
    capsys.readouterr()
    return path


def cells(line):
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_list_and_show(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    assert run("runs") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "deep/small" in x]
    assert cells(line)[:5] == ["deep/small", "done", "6", "6", "384"]
    assert cells(line)[-1] == "-"
    figure = tmp_path / "curves.png"
    assert run("runs", "show", str(trained), "--out", str(figure)) == 0
    shown = capsys.readouterr().out
    for name in ("loss (nats)", "held-out bits per byte", "learning rate", "gradient norm"):
        assert name in shown
    assert "done, step 6 of 6" in shown
    assert figure.read_bytes().startswith(b"\x89PNG")
    picture = figure.read_bytes()
    monkeypatch.setattr("meanbank.reports.run.png", lambda size, draw: picture)
    for out, file in (("page.html", "page.html"), ("folder", "folder/report.html")):
        assert run("runs", "show", str(trained), "--out", str(tmp_path / out)) == 0
        assert str(tmp_path / file) in capsys.readouterr().out.replace("\n", "")
        assert "<dd>6 of 6</dd>" in (tmp_path / file).read_text(encoding="utf-8")


def test_a_run_in_each_state(trained, tmp_path, capsys):
    assert find_runs(tmp_path) == [trained]
    lines = [json.loads(x) for x in (trained / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line][:4]
    for line in lines:
        line |= {"seconds": 2.5 * line["step"], "tokens_per_second": 10.0 * line["step"]}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (trained / "metrics.jsonl").write_text(text + '{"step": 5, "lo')
    with (trained / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = state_of(trained)
    assert (state.state, state.step, state.steps, state.tokens) == ("running", 4, 6, 256)
    assert state.seconds_left == 2 * 2.5
    assert state.tokens_per_second == 25
    assert state.loss == lines[-1]["loss"]
    for status, expected in {
        '{"state": "running", "reason": null}': ("failed", "its process was killed"),
        '{"state": "failed", "reason": "no space"}': ("failed", "no space"),
        '{"state": "stopped", "reason": "stopped by SIGINT"}': ("stopped", "stopped by SIGINT"),
    }.items():
        (trained / "status.json").write_text(status)
        state = state_of(trained)
        assert (state.state, state.reason, state.seconds_left) == (*expected, None)
    assert run("runs", str(tmp_path)) == 0
    assert f"{trained}: stopped by SIGINT" in capsys.readouterr().out
    (trained / "status.json").unlink()  # of an earlier version
    assert state_of(trained).state == "stopped"
    (trained / "metrics.jsonl").unlink()
    (trained / "run.json").unlink()
    state = state_of(trained)
    assert (state.step, state.steps, state.loss) == (0, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["EMPTY"], "holds no runs"),
        (["missing"], "there is no folder missing"),
        (["show"], "which run? meanbank runs show RUN"),
        (["show", "EMPTY"], "is not a run folder"),
        (["show", "EMPTY", "--out", "x.pdf"], "--out x.pdf must end in .html or .png"),
        (["EMPTY", "--out", "x.png"], "x.png: only `meanbank runs show RUN` takes more"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty")}
    assert run("runs", *(places.get(word, word) for word in arguments)) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_runs_in_a_folder_that_is_named_as_those_in_a_run(tmp_path):
    for place in ("run", "run/checkpoints/step-000001"):
        (tmp_path / "checkpoints" / place).mkdir(parents=True)
        (tmp_path / "checkpoints" / place / "config.yaml").touch()
    assert find_runs(tmp_path / "checkpoints") == [tmp_path / "checkpoints" / "run"]
