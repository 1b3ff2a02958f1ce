"""One run of a study: trained or gone on with, evaluated, and summed up in its result.

STUDY/runs/ARM/seed-N/       a run folder of `meanbank train`, or model.json of a model that exists,
                             and besides
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
from meanbank.studies.evaluations import RECORDS, Evaluated, evaluate
from meanbank.studies.origins import Origin, origin_of
from meanbank.studies.resolve import Arm, Study, read_study
from meanbank.studies.results import keep_result

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

    def place(self) -> dict[str, Any]:
        """Where its result belongs, by the study's names."""
        return {
            "study": self.study,
            "group": self.group,
            "arm": self.name,
            "label": self.arm.label,
            "seed": self.seed,
            "tuning": self.tuning,
        }

    @functools.cached_property
    def origin(self) -> Origin:
        """Where its model is from."""
        return origin_of(self.arm.seeded(self.seed), self.folder)

    @property
    def work(self) -> int:
        """How much there is to do: tokens to train on or, of a model that exists, evaluations."""
        return self.origin.tokens or len(self.arm.evaluations)

    def work_done(self) -> int:
        """How much of it is done."""
        return self.origin.tokens_done() if self.origin.tokens else len(self.evaluated())

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
        if kept != (as_read(self.origin.settings), as_read(settings)) or self.missing():
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
        for seed in (*arm.seeds, *(study.tuning_seeds if arm.is_trained_here else ()))
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
        if not job.origin.is_made():
            job.origin.make()
        waiting = job.missing() if alone else job.missing_beside()
        if waiting:
            keep_scores(job, job.origin.evaluated(), waiting)
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


def keep_scores(job: Job, evaluated: Evaluated, evaluations: Sequence[Evaluation]) -> None:
    """Evaluate, and keep all records, and the scores of each evaluation as soon as it is done."""
    settings = {each.title: to_plain(each) for each in evaluations}
    kept = job.evaluated()
    here = dataclasses.replace(evaluated, folder=job.evaluations)
    for each, result in zip(
        evaluations, evaluate(here, evaluations, keep_records=True), strict=True
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
    """The result of a job whose model is there and evaluated."""
    made, evaluated = job.origin.facts(), job.evaluated()
    place = job.folder.relative_to(job.out)
    evaluation = sum(each["seconds"] for each in evaluated.values())
    return {
        **job.place(),
        "config": job.origin.settings,
        "model": made.model,
        "overrides": list(job.arm.overrides),
        "matched": to_plain(job.arm.matched),
        "parameters": made.parameters,
        "tokens": made.tokens,
        "flops": made.flops,
        "seconds": {"training": made.seconds, "evaluation": evaluation},
        "scores": {k: v for each in evaluated.values() for k, v in each["scores"].items()},
        "evaluations": {title: f"{place}/{EVALUATIONS}/{title}.json" for title in evaluated},
        "evaluation_settings": [to_plain(each) for each in job.arm.evaluations],
        "curve": None if made.curve is None else f"{place}/{made.curve}",
        "produced_by": made.produced_by,
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
