"""The demo: small models of both axes on real text, trained, evaluated and compared."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from rich.console import Console

from meanbank.core.files import read_json, write_json
from meanbank.core.progress import progress
from meanbank.core.provenance import produced_by
from meanbank.data import Corpus, prepare_corpus
from meanbank.evaluation import bigram_bits_per_byte
from meanbank.evaluation.generation import SamplingSettings, stream_text
from meanbank.reports import load_demo, print_tables, write_report
from meanbank.studies.evaluations import EvaluationSettings
from meanbank.training import RunConfig, load_config, load_run
from meanbank.training.checkpoint import checkpoints
from meanbank.training.metrics import read_metrics
from meanbank.training.run import CONFIG, METRICS, check_resumable

LANGUAGE = ("kvm_sqrt_bank", "kvm_sqrt", "kvm_fixed", "full", "block_window")  # longest first
RECALL = {"kvm_sqrt": "recall_sqrt", "kvm_fixed": "recall_fixed", "full": "recall_full"}
RECALL_SEEDS = (0, 1)
SETTINGS = EvaluationSettings(max_tokens=131072, max_documents=16)
SAMPLING = SamplingSettings(max_new_tokens=96, temperature=0.8, top_p=0.9, seed=0)
PROMPT = "def read_lines(path):\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of the demo: its configuration, its folder and how it is evaluated."""

    config_name: str
    overrides: tuple[str, ...] = ()
    folder: Path
    tasks: tuple[str, ...]

    @functools.cached_property
    def config(self) -> RunConfig:
        return load_config(self.config_name, self.overrides)

    @property
    def steps(self) -> int:
        return self.config.training.steps

    @property
    def is_language(self) -> bool:
        return self.config.data.recall is None

    def is_trained(self) -> bool:
        found = checkpoints(self.folder)
        return bool(found) and found[-1].name == f"step-{self.steps:06d}"

    def steps_done(self) -> int:
        path = self.folder / METRICS
        lines = read_metrics(path) if path.is_file() else []
        return min(self.steps, max((line["step"] for line in lines), default=0))

    def is_evaluated(self, task: str) -> bool:
        path = self.folder / "evaluations" / f"{task}.json"
        if not path.is_file():
            return False
        result = read_json(path)
        return (result["step"], result["settings"]) == (self.steps, dataclasses.asdict(SETTINGS))


def demo_arms(out: Path) -> list[Arm]:
    """All runs of the demo, those that take longest first."""
    language = [
        Arm(
            config_name=f"quick/{name}",
            folder=out / "language" / name,
            tasks=("bpb", "position-loss", "memory"),
        )
        for name in LANGUAGE
    ]
    recall = [
        Arm(
            config_name=f"quick/{config}",
            overrides=(f"training.seed={seed}",),
            folder=out / "recall" / f"{name}-seed{seed}",
            tasks=("recall",),
        )
        for name, config in RECALL.items()
        for seed in RECALL_SEEDS
    ]
    return language + recall


def run_demo(out: Path, *, force: bool = False, jobs: int | None = None) -> Path:
    """Train and evaluate all arms, then write tables, figures and report.html; returns its path.

    Finished runs of an earlier demo are kept. Raises ValueError for a folder that holds something
    else, or runs of other settings.
    """
    started = time.monotonic()
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    arms = demo_arms(out)
    prepare_folder(out, arms, force=force)
    language = [arm for arm in arms if arm.is_language]
    corpus = prepare_corpus(language[0].config.data)
    train_and_evaluate(arms, jobs or min(4, os.cpu_count() or 1))
    write_bigram(out, corpus, language[0].config.data.sequence_length)
    children = Children()
    for arm in language:  # one at a time, with nothing beside it
        children.evaluate(arm, ["decode-speed"])
    samples = write_samples(out, language)
    report = write_report(out)
    console = Console(width=None if sys.stdout.isatty() else 100)
    print_tables(load_demo(out), console)
    for sample in samples:
        console.rule(f"{sample['arm']}: generated text", align="left")
        console.print(sample["prompt"] + sample["text"], markup=False, highlight=False)
    minutes = (time.monotonic() - started) / 60
    console.print(f"\nreport: {report} ({minutes:.1f} minutes)", markup=False, highlight=False)
    return report


def prepare_folder(out: Path, arms: Sequence[Arm], *, force: bool) -> None:
    """Make the demo's folder, or check that what it holds can be gone on with."""
    marker = out / "demo.json"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not marker.is_file():
            raise ValueError(f"{out} exists and holds something else; give another --out")
        if force:
            shutil.rmtree(out)
    for arm in arms:
        if (arm.folder / CONFIG).is_file():
            try:
                check_resumable(arm.folder, arm.config)
            except ValueError as error:
                raise ValueError(f"{error}; --force starts the demo afresh") from None
    write_json(marker, {"arms": [str(arm.folder.relative_to(out)) for arm in arms]})


def train_and_evaluate(arms: Sequence[Arm], jobs: int) -> None:
    """Bring every arm to its end, `jobs` at a time; progress counts training tokens."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    children = Children({"OMP_NUM_THREADS": str(threads)})

    def tokens(steps: Callable[[Arm], int]) -> int:
        return sum(steps(arm) * arm.config.data.sequence_length for arm in arms)

    shown, total = tokens(Arm.steps_done), tokens(lambda arm: arm.steps)
    with progress("demo", total, done=shown) as report, ThreadPoolExecutor(jobs) as pool:
        pending: set[Future] = {pool.submit(children.finish, arm) for arm in arms}
        try:
            while pending:
                ended, pending = wait(pending, timeout=2, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                now = tokens(Arm.steps_done)
                running = [arm.folder.name for arm in arms if 0 < arm.steps_done() < arm.steps]
                report(now - shown, ", ".join(running))
                shown = now
        except BaseException:
            for future in pending:
                future.cancel()
            children.stop()
            raise


class Children:
    """`meanbank` processes that are stopped together; their output goes to logs."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._running: set[subprocess.Popen] = set()
        self._stopping = threading.Event()

    def finish(self, arm: Arm) -> None:
        """Train an arm, or go on with it, and evaluate it, unless that is done."""
        if not arm.is_trained():
            again = ["--resume"] if (arm.folder / CONFIG).is_file() else []
            changes = ["--set", *arm.overrides] if arm.overrides else []
            self.run(arm, "train", arm.config_name, *changes, "--out", str(arm.folder), *again)
        self.evaluate(arm, [task for task in arm.tasks if not arm.is_evaluated(task)])

    def evaluate(self, arm: Arm, tasks: Sequence[str]) -> None:
        """Run evaluation tasks on an arm with the demo's settings."""
        if tasks:
            limits = ["--max-tokens", str(SETTINGS.max_tokens)]
            limits += ["--max-documents", str(SETTINGS.max_documents)]
            self.run(arm, "evaluate", str(arm.folder), "--task", ",".join(tasks), *limits)

    def run(self, arm: Arm, *arguments: str) -> None:
        """Run `meanbank ...`; ValueError with the last line of its log when it fails."""
        log = arm.folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", "meanbank", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # Ctrl-C comes to us; we pass it on
            )
            self._running.add(child)
            if self._stopping.is_set():
                child.terminate()
            try:
                code = child.wait()
            except BaseException:
                child.terminate()
                raise
            self._running.discard(child)
        if code != 0 and not self._stopping.is_set():
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            last = lines[-1] if lines else "no output"
            raise ValueError(f"{arm.folder.name} ended with code {code}: {last} (see {log})")

    def stop(self) -> None:
        """Ask all of them to save and end."""
        self._stopping.set()
        for child in list(self._running):
            child.terminate()


def write_bigram(out: Path, corpus: Corpus, sequence_length: int) -> None:
    """The bigram baseline on the windows that the models are evaluated on, in `bigram.json`."""
    limits = {"sequence_length": sequence_length, "max_tokens": SETTINGS.max_tokens}
    results = bigram_bits_per_byte(
        corpus, sequence_length=sequence_length, max_tokens=SETTINGS.max_tokens
    )
    facts = produced_by(device="cpu", dtype="float64", seed=None)
    result = {"task": "bigram", "settings": limits, "produced_by": facts, "results": results}
    write_json(out / "bigram.json", result)


def write_samples(out: Path, language: Sequence[Arm]) -> list[dict]:
    """A few lines of each language model for the same prompt, in `samples.json`."""
    samples = []
    for arm in language:
        run = load_run(arm.folder, "cpu")
        assert run.tokenizer is not None
        result = stream_text(run.model, run.tokenizer, PROMPT, SAMPLING)
        samples.append(
            {
                "arm": arm.folder.name,
                "prompt": PROMPT,
                "text": result.text,
                "tokens_per_second": result.tokens_per_second,
                "memory_bytes": result.memory_bytes,
            }
        )
    write_json(out / "samples.json", samples)
    return samples
