"""One process has a run at a time; what became of it is written down."""

import json
import os
import signal
import subprocess
import sys

import pytest

from meanbank.training import Interrupted, load_config, train
from meanbank.training import claim as claim_module
from meanbank.training import trainer as trainer_module
from meanbank.training.claim import check_unclaimed, claimed, is_claimed, recorded, status_of

# As `claimed` does it, without its imports.
HOLD = """
import fcntl, os, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(f"process {os.getpid()} on here")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_until_this_one_is_gone(config_file, tmp_path):
    config = load_config(config_file, ["training.steps=2"])
    run = train(config, tmp_path / "run")
    before = (run / "metrics.jsonl").read_text()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        assert status_of(run) == ("running", None)
        for options in ({"resume": True}, {"force": True}):
            with pytest.raises(ValueError, match=f"in use by process {other.pid} on here") as error:
                train(config, run, **options)
            assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="in use"), claimed(run):
            pass
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    assert not is_claimed(run)
    assert (run / "metrics.jsonl").read_text() == before
    train(config, run, resume=True)


def test_a_claim_ends_with_its_block(tmp_path):
    run = tmp_path / "deep" / "run"
    assert not is_claimed(run)
    with claimed(run):
        assert is_claimed(run)
        with pytest.raises(ValueError, match="in use"):
            check_unclaimed(run)
    check_unclaimed(run)
    (tmp_path / "file").write_text("")
    assert not is_claimed(tmp_path / "file")


def test_file_systems_without_locks_are_used_all_the_same(tmp_path, monkeypatch):
    def flock(descriptor, kind):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(claim_module.fcntl, "flock", flock)
    with claimed(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "done", None),
        (Interrupted(signal.SIGTERM, 4), "stopped", "stopped by SIGTERM after step 4"),
        (ValueError("a\nb"), "failed", "a b"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
    ],
)
def test_how_it_ended(tmp_path, error, state, reason):
    def body():
        assert status_of(tmp_path)[0] == "running"
        if error is not None:
            raise error

    with claimed(tmp_path):
        if error is None:
            with recorded(tmp_path):
                body()
        else:
            with pytest.raises(type(error)), recorded(tmp_path):
                body()
    assert status_of(tmp_path) == (state, reason)


def test_a_process_that_was_killed_has_failed(tmp_path):
    assert status_of(tmp_path) == (None, None)
    (tmp_path / "status.json").write_text('{"state": "running", "reason": null}')
    assert status_of(tmp_path) == ("failed", "its process was killed")
    (tmp_path / "status.json").write_text("[]")
    with pytest.raises(ValueError, match="is not the status of a run"):
        status_of(tmp_path)


def test_replacing_a_run_leaves_nothing_of_it(config_file, tmp_path):
    config = load_config(config_file, ["training.steps=2"])
    run = train(config, tmp_path / "run")
    (run / "evaluations").mkdir()
    (run / "evaluations" / "bpb.json").write_text("{}")
    train(config, run, force=True)
    assert not (run / "evaluations").exists()
    assert json.loads((run / "status.json").read_text()) == {"state": "done", "reason": None}


def test_a_failed_run_says_why(config_file, tmp_path, monkeypatch):
    def fail(self, batches):
        raise ValueError("no more")

    monkeypatch.setattr(trainer_module.Trainer, "_train_step", fail)
    with pytest.raises(ValueError, match="no more"):
        train(load_config(config_file), tmp_path / "run")
    assert status_of(tmp_path / "run") == ("failed", "no more")
