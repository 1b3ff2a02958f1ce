"""The demo: small models of both axes on real text, trained, evaluated and compared."""

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from rich.console import Console

from meanbank.core.files import write_json
from meanbank.core.progress import progress
from meanbank.core.provenance import produced_by
from meanbank.data import prepare_corpus
from meanbank.evaluation import bigram_bits_per_byte
from meanbank.evaluation.generation import SamplingSettings, stream_text
from meanbank.reports import load_demo, print_tables, write_report
from meanbank.training import RunConfig, load_config, load_run
from meanbank.training.checkpoint import checkpoints
from meanbank.training.metrics import read_metrics
from meanbank.training.run import CONFIG, METRICS, check_resumable

LANGUAGE = ("kvm_sqrt_bank", "kvm_sqrt", "kvm_fixed", "full", "block_window")  # longest first
RECALL = ("sqrt", "fixed", "full")
RECALL_SEEDS = (0, 1)
LANGUAGE_EVALUATION = ("--task", "bpb,position-loss,memory")
MAX_TOKENS = 131072  # of the held-out split, evenly spread; the same for every model
LIMITS = ("--max-tokens", str(MAX_TOKENS), "--max-documents", "16")
PROMPT = "def read_lines(path):\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One run of the demo: its configuration, its folder and how it is evaluated."""

    config: RunConfig
    config_name: str
    overrides: tuple[str, ...]
    folder: Path
    evaluation: tuple[str, ...]

    @property
    def steps(self) -> int:
        return self.config.training.steps

    def is_trained(self) -> bool:
        found = checkpoints(self.folder)
        return bool(found) and found[-1].name == f"step-{self.steps:06d}"

    def steps_done(self) -> int:
        path = self.folder / METRICS
        return (
            max((line["step"] for line in read_metrics(path)), default=0) if path.is_file() else 0
        )


def run_demo(out: Path, *, force: bool = False, jobs: int | None = None) -> Path:
    """Train and evaluate all arms, then write tables, figures and report.html; returns its path.

    Finished runs of an earlier demo are kept. Raises ValueError for a folder that holds something
    else, or runs of other settings.
    """
    started = time.monotonic()
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    jobs = jobs or min(4, os.cpu_count() or 1)
    arms = plan_arms(out)
    prepare_folder(out, arms, force=force)
    language = [arm for arm in arms if arm.folder.parent.name == "language"]
    corpus = prepare_corpus(language[0].config.data)
    train_and_evaluate(arms, jobs)
    console = Console(width=None if sys.stdout.isatty() else 100)
    if not (out / "bigram.json").is_file():
        limits = {
            "sequence_length": language[0].config.data.sequence_length,
            "max_tokens": MAX_TOKENS,
        }
        results = bigram_bits_per_byte(corpus, **limits)
        facts = produced_by(device="cpu", dtype="float64", seed=None)
        write_json(
            out / "bigram.json", {"task": "bigram", "produced_by": facts, "results": results}
        )
    for arm in language:  # one at a time, with nothing beside it
        run_command(arm, "evaluate", str(arm.folder), "--task", "decode-speed", threads=None)
    samples = write_samples(out, language)
    report = write_report(out)
    print_tables(load_demo(out), console)
    for sample in samples:
        console.rule(f"{sample['arm']}: generated text", align="left")
        console.print(sample["prompt"] + sample["text"], markup=False, highlight=False)
    minutes = (time.monotonic() - started) / 60
    console.print(f"\nreport: {report} ({minutes:.1f} minutes)", markup=False, highlight=False)
    return report


def plan_arms(out: Path) -> list[Arm]:
    """All runs of the demo, those that take longest first."""
    arms = []
    for name in LANGUAGE:
        arms.append(
            _arm(f"quick/{name}", (), out / "language" / name, LANGUAGE_EVALUATION + LIMITS)
        )
    for name in RECALL:
        for seed in RECALL_SEEDS:
            label = name if name == "full" else f"kvm_{name}"
            folder = out / "recall" / f"{label}-seed{seed}"
            overrides = (f"training.seed={seed}",)
            arms.append(_arm(f"quick/recall_{name}", overrides, folder, ("--task", "recall")))
    return arms


def _arm(name: str, overrides: tuple[str, ...], folder: Path, evaluation: tuple[str, ...]) -> Arm:
    return Arm(
        config=load_config(name, overrides),
        config_name=name,
        overrides=overrides,
        folder=folder,
        evaluation=evaluation,
    )


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
    """Bring every arm to its end, `jobs` at a time; progress counts training steps."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    cost = {arm.folder: arm.config.data.sequence_length for arm in arms}  # a step's rough share
    total = sum(arm.steps * cost[arm.folder] for arm in arms)

    def done() -> int:
        return sum(min(arm.steps_done(), arm.steps) * cost[arm.folder] for arm in arms)

    shown = done()
    _stopping.clear()  # a demo may be run again in the same process
    with progress("demo", total, done=shown) as report, ThreadPoolExecutor(jobs) as pool:
        pending: set[Future] = {pool.submit(finish_arm, arm, threads) for arm in arms}
        try:
            while pending:
                ended, pending = wait(pending, timeout=2, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                now = done()
                running = [arm.folder.name for arm in arms if 0 < arm.steps_done() < arm.steps]
                report(now - shown, ", ".join(running))
                shown = now
        except BaseException:
            for future in pending:
                future.cancel()
            stop_children()
            raise


def finish_arm(arm: Arm, threads: int) -> None:
    """Train an arm, or go on with it, and evaluate it, unless that is done."""
    if not arm.is_trained():
        again = ["--resume"] if (arm.folder / CONFIG).is_file() else []
        overrides = [word for override in arm.overrides for word in ("--set", override)]
        arguments = [arm.config_name, *overrides, "--out", str(arm.folder), *again]
        run_command(arm, "train", *arguments, threads=threads)
    tasks = arm.evaluation[1].split(",")
    if not all((arm.folder / "evaluations" / f"{task}.json").is_file() for task in tasks):
        run_command(arm, "evaluate", str(arm.folder), *arm.evaluation, threads=threads)


_children: set[subprocess.Popen] = set()
_stopping = threading.Event()


def run_command(arm: Arm, *arguments: str, threads: int | None) -> None:
    """Run `meanbank ...` in a process of its own; its output goes to the arm's log."""
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    log = arm.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "meanbank", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C comes to us; we pass it on
        )
        _children.add(child)
        if _stopping.is_set():
            child.terminate()
        code = child.wait()
        _children.discard(child)
    if code != 0 and not _stopping.is_set():
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        last = lines[-1] if lines else "no output"
        raise ValueError(f"{arm.folder.name} ended with code {code}: {last} (see {log})")


def stop_children() -> None:
    """Ask the running children to save and end."""
    _stopping.set()
    for child in list(_children):
        child.terminate()


def write_samples(out: Path, language: Sequence[Arm]) -> list[dict]:
    """A few lines of each language model for the same prompt, in `samples.json`."""
    settings = SamplingSettings(max_new_tokens=96, temperature=0.8, top_p=0.9, seed=0)
    samples = []
    for arm in language:
        run = load_run(arm.folder)
        assert run.tokenizer is not None
        result = stream_text(run.model, run.tokenizer, PROMPT, settings)
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
