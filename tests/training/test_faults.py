"""Runs that are killed, meet a full or broken disk, or are asked to stop: nothing is lost.

A fault is followed by the same command with --resume, as a user would do. What comes out then has
to be what a run without a fault gives: the same losses, and files with the same bytes.
"""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.faults import EVERY

ROOT = Path(__file__).resolve().parents[2]


def moments(count, kind, seed, **more):
    draw = random.Random(seed).random
    return [{"moment": draw(), "signal": kind, **more} for _ in range(count)]


def plans_of(kills, saves, anywhere, full, broken, stops):
    """So many trials of each kind."""
    return {
        "kill": moments(kills, signal.SIGKILL, 1),
        "save": [{"points": saves, "of": "save", "what": "kill"}],
        "anywhere": [{"points": anywhere, "of": "run", "what": "kill"}],
        "full": [
            {"points": -(-full // 2), "of": "save", "what": "ENOSPC"},
            {"points": full // 2, "of": "run", "what": "ENOSPC"},
        ],
        "broken": [{"points": broken, "of": "save", "what": what} for what in ("EIO", "EROFS")],
        "stop": [
            *moments(stops, signal.SIGTERM, 2),
            *moments(stops, signal.SIGINT, 3),
        ],
        "twice": [
            plan | {"again": 0.05 * draw}
            for kind in (signal.SIGTERM, signal.SIGINT)
            for plan, draw in zip(moments(stops, kind, 4), (0, 1, 2) * stops, strict=False)
        ],
    }


def run_trials(folder, plans):
    """Results by kind; one process that forks, for the workers of pytest have threads."""
    # every plan tells its kind, for what comes back is one list
    marked = [{**plan, "kind": kind} for kind, found in plans.items() for plan in found]
    (folder / "trials.json").write_text(json.dumps(marked))
    command = [sys.executable, str(Path(__file__).with_name("faults.py"))]
    command += [str(folder), str(folder / "trials.json")]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    places = {"MEANBANK_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        env={**os.environ, **settings, **places},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())["results"]
    assert {result["kind"] for result in results} == set(plans)
    return results


SMALL = plans_of(kills=5, saves=3, anywhere=2, full=2, broken=1, stops=1)
LARGE = plans_of(kills=100, saves=999, anywhere=60, full=30, broken=10, stops=25)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SMALL, id="some"),
        pytest.param(LARGE, id="all", marks=pytest.mark.slow),
    ],
)
def trials(request, tmp_path_factory):
    return run_trials(tmp_path_factory.mktemp("faults"), request.param)


def of_kind(trials, *kinds):
    found = [trial for trial in trials if trial["kind"] in kinds]
    assert found
    return found


def test_everything_is_as_if_nothing_had_happened(trials):
    for trial in trials:
        assert not trial["broken"], trial  # checkpoints that are not whole
        assert trial["resumed"] == 0, trial
        assert "damaged" not in trial["then"], trial
        assert trial["same"], trial
        assert not trial["left"], trial  # temporary files, after the next start


def test_a_kill_costs_few_steps(trials):
    """At most as many as there are from checkpoint to checkpoint."""
    kinds = of_kind(trials, "kill", "save", "anywhere")
    killed = [trial for trial in kinds if trial["code"] == -signal.SIGKILL]
    assert len(killed) > len(kinds) / 2
    for trial in killed:
        assert trial["lost"] <= EVERY, trial


def test_every_point_of_a_save_was_hit(trials):
    assert all(trial["code"] == -signal.SIGKILL for trial in of_kind(trials, "save"))


def test_what_the_disk_refuses_is_one_line(trials):
    for trial in of_kind(trials, "full", "broken"):
        assert trial["code"] == 2, trial
        told = [line for line in trial["said"].splitlines() if "error" in line]
        assert len(told) == 1, trial
        assert os.strerror(getattr(errno, trial["what"])) in told[0], trial
        assert "run-" in told[0], trial  # where
        assert "Traceback" not in trial["said"], trial
        if trial["thread"] == "checkpoint":  # the one before is told, and is there
            assert re.search("the checkpoint of step [36] is there", told[0]), trial
            assert trial["lost"] <= EVERY, trial


def test_a_signal_loses_nothing(trials):
    for trial in of_kind(trials, "stop"):
        assert trial["lost"] == 0, trial
        assert trial["seconds"] < 10, trial
        if trial["code"] == 128 + trial["signal"] and trial["done"]:
            assert f"after step {trial['done']}; go on with" in trial["said"], trial


def test_a_second_signal_ends_it_at_once_and_harms_nothing(trials):
    for trial in of_kind(trials, "twice"):
        assert trial["seconds"] < 10, trial
        assert trial["lost"] <= EVERY, trial
