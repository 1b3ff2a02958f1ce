"""Running a study: its folder, which jobs are missing, and how they come to their end.

STUDY/study.yaml      the study, complete, as it was last run
STUDY/claims.json     its claims as they were at first, before there were results
STUDY/runs/           see `meanbank.studies.job`
STUDY/results.jsonl   see `meanbank.studies.results`
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from meanbank.core.config import choose, to_plain
from meanbank.core.errors import one_line
from meanbank.core.files import locked, write_json
from meanbank.core.progress import Report, progress
from meanbank.data import Corpus, DataConfig, prepare_corpus
from meanbank.evaluation.driver import all_samples
from meanbank.studies.job import Job, clear, jobs_of, replaced, write_failure
from meanbank.studies.launch import Handle, Launcher
from meanbank.studies.resolve import STUDY, Study, write_study
from meanbank.studies.results import drop_results, keep_result, read_results
from meanbank.training.signals import StopSignals

CLAIMS, LOCK = "claims.json", ".lock"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_REPORTS = 2.0

Start = Callable[[Sequence[Job]], Sequence[Handle]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of a study came to.

    finished: how many jobs are finished now; ran: how many were started; failed: what
    `failure.json` holds, of each job that failed; stopped: the signal that ended it early.
    """

    finished: int
    ran: int
    failed: tuple[dict[str, Any], ...] = ()
    stopped: int | None = None

    @property
    def exit_code(self) -> int:
        """0, 1 where a job failed, or that of the signal."""
        return 128 + self.stopped if self.stopped is not None else int(bool(self.failed))


def run_study(
    study: Study,
    out: Path,
    launcher: Launcher,
    *,
    only: Collection[str] = (),
    tuning: bool = True,
    force: bool = False,
) -> Outcome:
    """Bring the jobs of a study to their end, those that are not finished.

    only: these arms alone; tuning: with the tuning seeds; force: arms whose training settings have
    changed since are made anew. Raises ValueError for a folder that holds something else or that
    another process runs a study in, for runs of other settings, and for an unknown arm.
    """
    for name in only:
        choose("arm", name, study.arms)
    everything = jobs_of(study, out)
    jobs = [
        job for job in everything if (not only or job.name in only) and (tuning or not job.tuning)
    ]
    check_folder(out)
    check_evaluations_fit([job for job in jobs if job.result() is None])
    with in_use(out):
        changed = changed_jobs(everything, jobs if force else ())
        prepare_folder(study, out)
        make_room(out, changed)
        keep_what_is_finished(everything, out)
        return Engine(jobs, launcher).run(unfinished(jobs))


def check_folder(out: Path) -> None:
    """Raise ValueError where a study cannot be put."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give another --out")
    holds = {path.name for path in out.iterdir()} - {LOCK} if out.is_dir() else set()
    if holds and STUDY not in holds and any(not name.startswith(".") for name in holds):
        raise ValueError(f"{out} exists and holds something else; give another --out")


def check_evaluations_fit(jobs: Sequence[Job]) -> None:
    """Raise ValueError where an evaluation does not fit its arm, before hours of training.

    Samples are chosen on models without weights. That prepares texts, too: once, before several
    jobs want them. A model that exists has to be there.
    """
    arms = {job.name: job for job in jobs}
    corpora: dict[DataConfig | None, Corpus | None] = {None: None}
    for name, job in arms.items():
        try:
            data = job.origin.data
            if data is not None and data not in corpora:
                corpora[data] = prepare_corpus(data)
            outline = job.origin.outline(corpora[data])
        except ValueError as error:
            raise ValueError(f"arm {name}: {one_line(error)}") from None
        subject = dataclasses.replace(outline, name=f"arm {name}")
        for evaluation in job.arm.evaluations:
            try:
                all_samples(evaluation, evaluation.prepared(subject))
            except ValueError as error:
                raise ValueError(
                    f"{evaluation.title} does not fit arm {name}: {one_line(error)}"
                ) from None


@contextlib.contextmanager
def in_use(out: Path) -> Iterator[None]:
    """Keep other processes from running a study in a folder."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(out / LOCK, wait=False))
        except BlockingIOError:
            raise ValueError(
                f"{out} is in use: another `meanbank study run` works there; wait for it, or give "
                "another --out"
            ) from None
        yield


def changed_jobs(jobs: Sequence[Job], forced: Sequence[Job]) -> list[Job]:
    """Jobs whose run was made from other settings; ValueError for the first that is not forced."""
    changed = []
    for job in jobs:
        try:
            job.origin.check()
        except ValueError as error:
            if job not in forced:
                raise ValueError(f"{error}; --force makes arm {job.name} anew") from None
            changed.append(job)
    return changed


def prepare_folder(study: Study, out: Path) -> None:
    """Write what the study is, and what it claims as long as there are no results."""
    write_study(out, study)
    if not (out / CLAIMS).is_file() or not read_results(out):
        write_json(out / CLAIMS, to_plain(study.claims))


def make_room(out: Path, changed: Sequence[Job]) -> None:
    """Remove runs of other settings and their results."""
    keys = {(job.name, job.seed) for job in changed}
    if keys:
        drop_results(out, lambda result: (result["arm"], result["seed"]) in keys)
    for job in changed:
        with locked(job.lock):
            clear(job)
            job.folder.rename(replaced(job))  # at once: half a run could not be gone on with
            clear(job)


def keep_what_is_finished(jobs: Sequence[Job], out: Path) -> None:
    """Make results those of the jobs that are finished, as the study names them now.

    One of other settings, or of a seed or arm that the study has no more, is none of its results; a
    job may have been killed right before it wrote its own.
    """
    finished = {
        (job.name, job.seed): {**result, **job.place()}
        for job in jobs
        if (result := job.result()) is not None
    }
    drop_results(out, lambda result: (result["arm"], result["seed"]) not in finished)
    for result in finished.values():
        keep_result(out, result)


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """Jobs that are not finished, those that take longest first."""
    waiting = [job for job in jobs if job.result() is None]
    arms = {job.name: job for job in waiting}
    costs = {name: job.origin.flops() for name, job in arms.items()}
    return sorted(waiting, key=lambda job: -costs[job.name])


class Engine:
    """Jobs on their way; `jobs` are all that progress is counted over."""

    def __init__(self, jobs: Sequence[Job], launcher: Launcher) -> None:
        self._jobs, self._launcher = jobs, launcher
        self._done = [job.work_done() for job in jobs]
        self._failed: list[dict[str, Any]] = []
        self._ran = 0
        self._stopped: int | None = None

    def run(self, waiting: Sequence[Job]) -> Outcome:
        """Run the jobs that wait: first what can run side by side, then what has to run alone."""
        total, done = sum(job.work for job in self._jobs), sum(self._done)
        if waiting:
            title = f"study {waiting[0].study}"
            with progress(title, total, done=done) as report, StopSignals() as stop:
                try:
                    beside = [job for job in waiting if not lacks_only_alone(job)]
                    self._bring_to_end(beside, self._launcher.start, report, stop)
                    alone = [job for job in waiting if lacks_only_alone(job)]
                    self._bring_to_end(alone, self._launcher.start_alone, report, stop)
                except BaseException:
                    self._launcher.stop()
                    raise
                finally:
                    self._launcher.close()
        return Outcome(
            finished=sum(job.result() is not None for job in self._jobs),
            ran=self._ran,
            failed=tuple(self._failed),
            stopped=self._stopped,
        )

    def _bring_to_end(
        self, jobs: Sequence[Job], start: Start, report: Report, stop: StopSignals
    ) -> None:
        if not jobs or self._stopped is not None:
            return
        self._ran += len(jobs)
        pending = list(zip(jobs, start(jobs), strict=True))
        told = time.monotonic()
        while pending:
            left = []
            for job, handle in pending:
                if not handle.done():
                    left.append((job, handle))
                elif (code := handle.result()) != 0 and self._stopped is None:
                    self._failed.append(write_failure(job, code))
            pending = left
            if self._stopped is None and (number := stop.number) is not None:
                self._stopped = number
                self._launcher.stop()  # and wait until they have saved
            if not pending or time.monotonic() - told > SECONDS_BETWEEN_REPORTS:
                told = time.monotonic()
                self._report(report)
            if pending:
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _report(self, report: Report) -> None:
        done = [job.work_done() for job in self._jobs]
        running = [
            str(job)
            for job, before, now in zip(self._jobs, self._done, done, strict=True)
            if now > before
        ]
        report(sum(done) - sum(self._done), ", ".join(running))
        self._done = done


def lacks_only_alone(job: Job) -> bool:
    """Whether nothing of a job is left but what nothing may run beside."""
    return bool(job.origin.is_made() and job.missing() and not job.missing_beside())
