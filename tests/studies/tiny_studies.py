"""Studies of seconds, evaluations that are worked out at once, and jobs without processes."""

import json
from concurrent.futures import Future
from pathlib import Path

import torch
import yaml

from meanbank.evaluation.base import Evaluation, Sample
from meanbank.studies.engine import run_study
from meanbank.studies.job import run_job
from meanbank.studies.resolve import load_study
from meanbank.studies.results import read_results
from meanbank.training.metrics import read_metrics
from meanbank.training.run import read_config

SMALL = [
    "training.steps=3",
    "training.warmup_steps=1",
    "training.checkpoint_every=1",
    "training.device=cpu",
    "model.hidden_size=16",
    "data.batch_size=4",
    "data.recall={curriculum: [{fraction: 0.5, length: 16, pairs: [2]},"
    " {fraction: 0.5, length: 32, pairs: [4]}]}",
]


class Weights(Evaluation, tag="weights-for-tests"):
    """The sum of all weights, in two samples."""

    def samples(self, subject):
        return [Sample(id="first"), Sample(id="second")]

    def measure(self, subject, samples):
        weights = [weight.double().sum() for weight in subject.model.parameters()]
        return [{"sum": torch.stack(weights).sum().item()} for _ in samples]

    def results(self, subject, records):
        return {"sum": records[0]["sum"], "records": len(records)}

    def scores(self, results):
        return {self.title: results["sum"], f"{self.title}@{results['records']}": 1.0}


class Timed(Weights, tag="timed-for-tests"):
    """As if it measured time."""

    @property
    def alone(self):
        return True


def study_file(folder: Path, **changes) -> Path:
    """A study of two arms with one seed, changed as told."""
    settings = {
        "title": "Tiny",
        "seeds": [7],
        "groups": {
            "recall": {
                "overrides": SMALL,
                "evaluations": ["weights-for-tests"],
                "arms": {"grows": "quick/recall_sqrt", "fixed": "quick/recall_fixed"},
            }
        },
    }
    group = changes.pop("group", {})
    settings["groups"]["recall"].update(group)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**settings, **changes}, sort_keys=False), encoding="utf-8")
    return path


class InProcess:
    """Runs each job at once, in this process, and keeps which ones; `broken` arms fail."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken = broken
        self.started: list[str] = []

    def start(self, jobs):
        return [self._run(job) for job in jobs]

    def start_alone(self, jobs):
        return [self._run(job, alone=True) for job in jobs]

    def _run(self, job, **how):
        self.started.append(f"{job}{' alone' if how else ''}")
        future = Future()
        if job.name in self.broken:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            job.log.write_text("progress\nmeanbank: error: the loss is nan at step 2\n")
            future.set_result(2)
        else:
            run_job(job, **how)
            if job.arm.is_trained_here:
                assert read_config(job.folder) == job.arm.seeded(job.seed)
            future.set_result(0)
        return future

    def stop(self):
        pass

    def close(self):
        pass


def run(file, out, launcher=None, **how):
    """Run a study, in this process unless told otherwise."""
    return run_study(load_study(file), out, launcher or InProcess(), **how)


def by_job(out):
    """Results by arm and seed."""
    return {(result["arm"], result["seed"]): result for result in read_results(out)}


def outcome_of(out, steps=3):
    """What a study found, without what the clock decides; every step stands there once."""
    lines = (out / "results.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        key = line["arm"], line["seed"]
        assert key not in found, f"two lines of {key}"
        metrics = read_metrics(out / line["curve"])
        assert [each["step"] for each in metrics] == list(range(1, steps + 1))
        losses = [(each["loss"], each["gradient_norm"], each["tokens"]) for each in metrics]
        found[key] = line["scores"], line["config"], line["tokens"], losses
    return found
