"""How jobs are run: as processes here, or on a cluster with Slurm."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from meanbank.core.errors import one_line
from meanbank.studies.job import Job

MEANBANK = (sys.executable, "-m", "meanbank")
PARENT_SECONDS = 0.5  # between two looks at whether a job's parent is still there


class Handle(Protocol):
    """A job that was started."""

    def done(self) -> bool: ...

    def result(self) -> int:
        """The exit code of its process, negative for a signal; waits for it."""
        ...


class Launcher(Protocol):
    """Runs jobs, each with `meanbank study job`."""

    def start(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Have the jobs run beside each other, the first ones first."""
        ...

    def start_alone(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Have the jobs run one after the other, with nothing beside."""
        ...

    def stop(self) -> None:
        """Ask what runs to save and end, and start nothing more; asked again, end it at once."""
        ...

    def close(self) -> None:
        """Wait for what runs."""
        ...


def command_of(job: Job, *more: str) -> list[str]:
    """The arguments of `meanbank` that run a job."""
    return ["study", "job", str(job.out.resolve()), job.name, str(job.seed), *more]


class Processes:
    """Processes on this machine, `jobs` at a time with as many threads as leave none over.

    command: what `meanbank` is called with.
    """

    def __init__(self, jobs: int, command: Sequence[str] = MEANBANK) -> None:
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {jobs}")
        self._command = command
        self._threads = max(1, (os.cpu_count() or 1) // jobs)
        self._beside, self._alone = ThreadPoolExecutor(jobs), ThreadPoolExecutor(1)
        self._running: set[subprocess.Popen] = set()
        self._stopping = threading.Event()
        self._guard = threading.Lock()

    def start(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        threads = {"OMP_NUM_THREADS": str(self._threads)}
        return [self._beside.submit(self._run, job, threads) for job in jobs]

    def start_alone(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        return [self._alone.submit(self._run, job, {}, "--alone") for job in jobs]

    def _run(self, job: Job, environment: Mapping[str, str], *more: str) -> int:
        with self._guard:
            if self._stopping.is_set():
                return -signal.SIGTERM
            child = start_child([*self._command, *command_of(job, *more)], job.log, environment)
            self._running.add(child)
        code = child.wait()
        with self._guard:
            self._running.discard(child)
        return code

    def stop(self) -> None:
        with self._guard:
            number = signal.SIGKILL if self._stopping.is_set() else signal.SIGTERM
            self._stopping.set()
            for child in self._running:
                child.send_signal(number)

    def close(self) -> None:
        for pool in (self._beside, self._alone):
            pool.shutdown()


# What submitit calls alike for every executor; all else is Slurm's own.
SHARED = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node")


class Slurm:
    """Jobs of a cluster, in one array, by submitit, which writes its files into `folder`.

    parameters: of submitit's executor, such as partition, timeout_min or gpus_per_node. `cluster`
    among them chooses another executor than Slurm's ("local": processes here).
    """

    def __init__(self, folder: Path, parameters: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ImportError:
            raise ImportError("--slurm needs submitit: pip install 'meanbank[slurm]'") from None
        settings = {"cluster": "slurm", "name": "meanbank-study", **parameters}
        cluster = settings.pop("cluster")
        names = {name: name if name in SHARED else f"slurm_{name}" for name in settings}
        try:
            self._executor = submitit.AutoExecutor(folder=folder.resolve(), cluster=cluster)
            self._executor.update_parameters(**{names[k]: v for k, v in settings.items()})
        except Exception as error:  # submitit's own kinds, of all sorts
            raise ValueError(f"--slurm: {one_line(error)}") from None
        self._started: list[Any] = []

    def start(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        return self._submit(jobs)

    def start_alone(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        self._executor.update_parameters(slurm_array_parallelism=1)
        return self._submit(jobs, "--alone")

    def _submit(self, jobs: Sequence[Job], *more: str) -> Sequence[Handle]:
        commands = [[*MEANBANK, *command_of(job, *more)] for job in jobs]
        logs = [job.log.resolve() for job in jobs]
        started = self._executor.map_array(run_child, commands, logs)
        self._started += started
        return [Submitted(of, log) for of, log in zip(started, logs, strict=True)]

    def stop(self) -> None:
        for job in self._started:
            job.cancel(check=False)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A job that submitit knows; whatever went wrong with it there goes to its log."""

    job: Any
    log: Path

    def done(self) -> bool:
        return self.job.done()

    def result(self) -> int:
        try:
            return self.job.result()
        except Exception as error:  # submitit's own kinds: cancelled, out of time, not to be read
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{one_line(error)}\n")
            return 1


def start_child(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Start a job's process, which adds to `log`, and ends when this process has ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C comes to us; we pass it on
        )


def run_child(command: Sequence[str], log: Path) -> int:
    """`start_child`, to its end; returns its exit code."""
    return start_child(command, log).wait()


def end_with(parent: int) -> None:
    """Have this process asked to end, by SIGTERM, once its parent is another one than `parent`.

    Also when submitit tells that its time is nearly over, by SIGUSR2.
    """

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        end()

    signal.signal(signal.SIGUSR2, end)
    threading.Thread(target=watch, daemon=True).start()
