"""One run of a study: trained or gone on with, evaluated, and summed up in its result.

STUDY/runs/ARM/seed-N/       a run folder of `meanbank train`, and besides
    evaluated/               results and records by evaluation: not where `meanbank evaluate`
                             puts its own, which replace each other
    evaluated.json           scores by evaluation, as they come
    result.json              everything, written last
    failure.json             in its place: what went wrong
STUDY/runs/ARM/seed-N.log    what the run said
"""

import dataclasses
import functools
import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meanbank.core.config import choose, to_plain
from meanbank.core.files import as_read, locked, read_object, write_json
from meanbank.evaluation.base import Evaluation
from meanbank.model import MeanbankConfig
from meanbank.model.accounting import empty_model
from meanbank.studies.evaluations import RECORDS, evaluate_run
from meanbank.studies.resolve import Arm, Study, read_study
from meanbank.studies.results import keep_result
from meanbank.training import LoadedRun, RunConfig, load_run, train
from meanbank.training.checkpoint import checkpoints
from meanbank.training.metrics import last_tokens, training_seconds
from meanbank.training.planning import training_flops, training_tokens
from meanbank.training.run import CONFIG, METRICS, run_info

RUNS, EVALUATIONS = "runs", "evaluated"
EVALUATED, RESULT, FAILURE = "evaluated.json", "result.json", "failure.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """An arm with a seed. out: the study's folder; tuning: the seed is not one to judge by."""

    out: Path
    study: str
    group: str
    name: str
    arm: Arm
    seed: int
    tuning: bool

    def __str__(self) -> str:
        return f"{self.name} seed {self.seed}"

    @functools.cached_property
    def config(self) -> RunConfig:
        return self.arm.seeded(self.seed)

    @property
    def folder(self) -> Path:
        return self.out / RUNS / self.name / f"seed-{self.seed}"

    @property
    def evaluations(self) -> Path:
        """The folder of its results by evaluation."""
        return self.folder / EVALUATIONS

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.lock")

    @property
    def tokens(self) -> int:
        """Tokens that it trains on."""
        return training_tokens(self.config)

    def tokens_done(self) -> int:
        """Those that it has trained on so far."""
        return min(self.tokens, last_tokens(self.folder / METRICS))

    def is_trained(self) -> bool:
        found = checkpoints(self.folder)
        return bool(found) and found[-1].name == f"step-{self.config.training.steps:06d}"

    def evaluated(self) -> dict[str, dict[str, Any]]:
        """`settings`, `scores` and `seconds` by title, of what was evaluated as it is to be."""
        path = self.folder / EVALUATED
        found = read_object(path) if path.is_file() else {}
        wanted = {each.title: as_read(to_plain(each)) for each in self.arm.evaluations}
        return {
            title: found[title]
            for title, settings in wanted.items()
            if isinstance(found.get(title), dict)
            and found[title].get("settings") == settings
            and all((self.evaluations / f"{title}{end}").is_file() for end in (".json", RECORDS))
        }

    def missing(self) -> list[Evaluation]:
        """What is still to be evaluated."""
        done = self.evaluated()
        return [each for each in self.arm.evaluations if each.title not in done]

    def missing_beside(self) -> list[Evaluation]:
        """Of those, what other jobs may run beside."""
        return [each for each in self.missing() if not each.alone]

    def result(self) -> dict[str, Any] | None:
        """Its result, where it is finished: with this configuration and these evaluations.

        One whose evaluations have lost files is not: they are done again.
        """
        path = self.folder / RESULT
        if not path.is_file():
            return None
        result, settings = read_object(path), [*map(to_plain, self.arm.evaluations)]
        kept = (result.get("config"), result.get("evaluation_settings"))
        if kept != (as_read(self.config.plain()), as_read(settings)) or self.missing():
            return None
        return result


def jobs_of(study: Study, out: Path) -> list[Job]:
    """All jobs of a study, those of tuning seeds last in each arm."""
    return [
        Job(
            out=out,
            study=study.name,
            group=group_name,
            name=name,
            arm=arm,
            seed=seed,
            tuning=seed in study.tuning_seeds,
        )
        for group_name, group in study.groups.items()
        for name, arm in group.arms.items()
        for seed in (*arm.seeds, *study.tuning_seeds)
    ]


def find_job(out: Path, arm: str, seed: int) -> Job:
    """The job of a study's folder; ValueError where the study has no such arm or seed."""
    study = read_study(out)
    choose("arm", arm, study.arms)
    of_arm = {str(job.seed): job for job in jobs_of(study, out) if job.name == arm}
    return of_arm[choose(f"seed of arm {arm}", str(seed), of_arm)]


def run_job(job: Job, *, alone: bool = False) -> bool:
    """Bring a job as far as it goes; whether it is finished.

    alone: nothing runs beside it, so that it may do the evaluations that measure time, too. Goes on
    with what an earlier try left. Raises what training and evaluating raise.
    """
    with locked(job.lock):  # a process of a killed study may still be saving
        clear(job)
        if not job.is_trained():
            train(job.config, job.folder, resume=(job.folder / CONFIG).is_file())
        waiting = job.missing() if alone else job.missing_beside()
        if waiting:
            run = load_run(job.folder, job.config.training.device)
            keep_scores(job, run, waiting)
        if job.missing():
            return False
        result = sum_up(job)
        write_json(job.folder / RESULT, result)
        keep_result(job.out, result)
        return True


def clear(job: Job) -> None:
    """Remove what an earlier try left that is in the way."""
    (job.folder / FAILURE).unlink(missing_ok=True)
    for left in job.folder.rglob(".*.tmp"):  # of a process that was killed
        if left.is_file():
            left.unlink()
    aside = replaced(job)
    if aside.exists():
        shutil.rmtree(aside)


def replaced(job: Job) -> Path:
    """Where a run of other settings goes before it is removed."""
    return job.folder.with_name(f".{job.folder.name}.old")


def keep_scores(job: Job, run: LoadedRun, evaluations: Sequence[Evaluation]) -> None:
    """Evaluate, and keep the scores of each evaluation as soon as it is done."""
    settings = {each.title: to_plain(each) for each in evaluations}
    kept = job.evaluated()
    for each, result in zip(
        evaluations, evaluate_run(run, evaluations, job.evaluations), strict=True
    ):
        for name, value in result["scores"].items():
            if not math.isfinite(value):
                raise ValueError(f"the score {name} of {job} is {value}")
        kept[each.title] = {
            "settings": settings[each.title],
            "scores": result["scores"],
            "seconds": result["seconds"],
        }
        write_json(job.folder / EVALUATED, kept)


def sum_up(job: Job) -> dict[str, Any]:
    """The result of a job that is trained and evaluated."""
    info, evaluated = run_info(job.folder), job.evaluated()
    place = job.folder.relative_to(job.out)
    model = empty_model(MeanbankConfig.from_pretrained(checkpoints(job.folder)[-1]))
    seconds = {
        "training": training_seconds(job.folder / METRICS),
        "evaluation": sum(each["seconds"] for each in evaluated.values()),
    }
    facts = ("version", "commit", "python", "torch", "device", "dtype", "threads", "seed")
    return {
        "study": job.study,
        "group": job.group,
        "arm": job.name,
        "label": job.arm.label,
        "seed": job.seed,
        "tuning": job.tuning,
        "config": job.config.plain(),
        "overrides": list(job.arm.overrides),
        "matched": to_plain(job.arm.matched),
        "parameters": info["parameters"],
        "tokens": last_tokens(job.folder / METRICS),
        "flops": training_flops(model, job.config),
        "seconds": seconds,
        "scores": {k: v for each in evaluated.values() for k, v in each["scores"].items()},
        "evaluations": {title: f"{place}/{EVALUATIONS}/{title}.json" for title in evaluated},
        "evaluation_settings": [to_plain(each) for each in job.arm.evaluations],
        "curve": f"{place}/{METRICS}",
        "produced_by": {name: info[name] for name in facts},
    }


def write_failure(job: Job, code: int) -> dict[str, Any]:
    """Keep what a job's process left when it ended with that exit code; returns it."""
    lines = []
    if job.log.is_file():
        lines = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    message = lines[-1].removeprefix("meanbank: error: ") if lines else "it said nothing"
    if code < 0:
        message = f"ended by {signal.Signals(-code).name}; the last it said: {message}"
    failure = {
        "study": job.study,
        "arm": job.name,
        "seed": job.seed,
        "code": code,
        "message": message,
        "log": str(job.log.relative_to(job.out)),
    }
    write_json(job.folder / FAILURE, failure)
    return failure
