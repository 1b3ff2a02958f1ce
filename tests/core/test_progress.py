"""Progress of the first build: plain lines where there is no terminal."""

import sys

import pytest

from meanbank.core import progress as module
from meanbank.core.progress import progress


def test_plain_lines_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("encoding", 4) as report:
        report(1)
        report(3)
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert first.startswith("encoding: 25 %, ")
    assert first.endswith(" s left")
    assert last.startswith("encoding: done in")


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("encoding", 4) as report:
        report(4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "encoding" in err
    assert "100%" in err


def test_a_step_inside_another_is_silent(capsys: pytest.CaptureFixture[str]):
    with progress("outer", 2), progress("inner", 2) as report:
        report(1)
    err = capsys.readouterr().err
    assert "inner" not in err
    assert "outer: done" in err
