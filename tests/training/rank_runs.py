"""Runs on several ranks for tests: how they are asked for, and compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meanbank.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 6, 3
BASE = [
    f"training.steps={STEPS}",
    f"training.checkpoint_every={EVERY}",
    "training.keep_last=9",
    "training.evaluate_every=4",
    "data.batch_size=7",  # which no number of ranks divides, nor the rows of tables:
    "data.vocab_size=271",
    "data.sequence_length=24",
]
# Aids that say more in other files, and other shapes at first; all must be those of one process.
AIDS = [
    "training.position_loss_every=2",
    "training.memory_statistics_every=2",
    "data.sequence_lengths=[{fraction: 0.5, length: 12}, {fraction: 0.5, length: 24}]",
]
RECIPES = {
    "plain": ["training.recipe=plain"],
    "kvm": ["training.recipe=kvm"],
    "bov": ["training.recipe=bov"],
    "sparse": ["training.recipe={type: bov, table_gradients: sparse, clip: 1.0}", *AIDS],
}
FSDP, SHARDED = "training.parallel=fsdp", "training.tables=sharded"


def accumulated(parts):
    return f"training.accumulation={parts}"


def run_of(name, recipe, *sets, **more):
    return {"run": name, "set": [*BASE, *RECIPES[recipe], *sets], "double": True, **more}


def run_trials(folder, plans):
    """Results by name; one process that forks, for the workers of pytest have threads."""
    (folder / "trials.json").write_text(json.dumps(plans))
    command = [sys.executable, str(Path(__file__).with_name("rank_trials.py"))]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    places = {"MEANBANK_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(folder), str(folder / "trials.json")],
        env={**os.environ, **settings, **places},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def plan(name, ranks, *runs, **more):
    return {"name": name, "ranks": ranks, "runs": list(runs), **more}


FILES = ("model", "optimizer")


def assert_same_run(folder, trials, name, reference, tolerance=1e-9):
    """The same figures in every line, and the same tensors in every checkpoint."""
    lines, other = (
        next(t["seen"][run]["figures"] for t in reversed(trials) if run in t["seen"])
        for run in (name, reference)
    )
    assert len(lines) == len(other) > STEPS
    for line, expected in zip(lines, other, strict=True):
        assert line == pytest.approx(expected, rel=tolerance), (name, line, expected)
    assert_same_statistics(folder / name, folder / reference, tolerance)
    last = (f"checkpoints/step-{lines[-1]['step']:06d}/{kind}.safetensors" for kind in FILES)
    for file in last:
        found, expected = load_file(folder / name / file), load_file(folder / reference / file)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            if "rng" not in key:
                torch.testing.assert_close(tensor, expected[key], rtol=tolerance, atol=tolerance)


def assert_same_statistics(run, reference, tolerance):
    """The same numbers in every line of `statistics.jsonl`, if there are any."""
    found, expected = (
        read_metrics(path) if (path := folder / "statistics.jsonl").is_file() else []
        for folder in (run, reference)
    )
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        assert flat(line) == pytest.approx(flat(other), rel=tolerance), run


def flat(value, name=""):
    """The numbers in nested lists and mappings, by their place."""
    if isinstance(value, int | float):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    nested = [(at, each) for at, each in items if isinstance(each, int | float | list | dict)]
    return {at: x for key, each in nested for at, x in flat(each, f"{name}/{key}").items()}
