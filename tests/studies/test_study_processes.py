"""Jobs of studies as processes: here, stopped and killed, and by submitit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meanbank.cli import main
from meanbank.studies.launch import Processes
from meanbank.training.metrics import read_metrics
from tests.studies.tiny_studies import SMALL, by_job, outcome_of, run, study_file

ROOT = Path(__file__).resolve().parents[2]
# `meanbank` as a job's process, with the evaluations of these tests
MEANBANK = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.studies.tiny_studies; "
    "from meanbank.cli import main; main()",
)
FAILS = "'grows' in sys.argv and sys.exit('meanbank: error: the loss is nan')"


def test_jobs_are_processes_of_their_own(tmp_path):
    """One of two fails at once."""
    file, out = study_file(tmp_path), tmp_path / "out"
    *python, program = MEANBANK
    outcome = run(file, out, Processes(2, (*python, f"import sys; {FAILS}; {program}")))
    assert (outcome.exit_code, outcome.finished) == (1, 1)
    assert outcome.failed[0]["message"] == "the loss is nan"
    assert (outcome.failed[0]["arm"], outcome.failed[0]["code"]) == ("grows", 1)
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert by_job(out)["fixed", 7]["produced_by"]["threads"] == threads


def steps_done(out):
    return sum(len(read_metrics(path)) for path in out.rglob("metrics.jsonl"))


def started(file, out, *more):
    """`meanbank study run`, once its jobs have made a few steps."""
    before = steps_done(out)
    command = [
        sys.executable,
        "-m",
        "meanbank",
        "study",
        "run",
        str(file),
        "--out",
        str(out),
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and steps_done(out) < before + 10:
        time.sleep(0.05)
    return process


def children(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


MANY_STEPS = ["training.steps=300", "training.checkpoint_every=50"]


@pytest.mark.slow
def test_a_study_whose_processes_are_stopped_and_killed_comes_to_the_same_end(tmp_path):
    arms = {
        name: {"config": f"quick/recall_{config}", "overrides": MANY_STEPS}
        for name, config in {"grows": "sqrt", "fixed": "fixed"}.items()
    }
    group = {"arms": arms, "evaluations": []}
    file = study_file(tmp_path, group=group)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert started(file, whole, "--jobs", "2").wait() == 0
    for number, code in {signal.SIGTERM: 143, signal.SIGINT: 130}.items():
        process = started(file, out, "--jobs", "2")
        process.send_signal(number)
        assert process.wait() == code
        assert list(out.rglob("step-*")), "nothing was saved"
    process = started(file, out, "--jobs", "2")
    os.kill(children(process)[0], signal.SIGKILL)
    assert process.wait() == 1
    (failure,) = out.rglob("failure.json")
    assert "ended by SIGKILL" in json.loads(failure.read_text())["message"]
    orphans_of = started(file, out, "--jobs", "2")
    orphans_of.kill()  # and its jobs are still there when the next one begins
    orphans_of.wait()
    assert started(file, out, "--jobs", "2").wait() == 0
    assert outcome_of(out, 300) == outcome_of(whole, 300)
    assert len(outcome_of(out, 300)) == 2


@pytest.mark.slow
def test_jobs_of_a_cluster(tmp_path, capsys):
    pytest.importorskip("submitit", reason="pip install 'meanbank[slurm]'")
    file = study_file(
        tmp_path, group={"evaluations": [], "overrides": [*SMALL, "data.batch_size=2"]}
    )
    out = tmp_path / "out"
    settings = ["cluster=local", "timeout_min=5"]
    with pytest.raises(SystemExit) as stop:
        main(["study", "run", str(file), "--out", str(out), "--slurm", *settings])
    assert stop.value.code == 0, capsys.readouterr().err
    assert {key: result["tokens"] for key, result in by_job(out).items()} == {
        ("grows", 7): 2 * 64,
        ("fixed", 7): 2 * 64,
    }
    with pytest.raises(SystemExit) as stop:
        main(["study", "run", str(file), "--out", str(out), "--slurm", "cluster=local", "gpus=1x"])
    assert stop.value.code == 2
