"""A run folder: where it is made, checked and read.

RUN/config.yaml     the resolved configuration
RUN/run.json        version, seed, data and sizes
RUN/metrics.jsonl   one JSON line a step
RUN/statistics.jsonl   how memories are used, where that is asked for: see `statistics`
RUN/checkpoints/    the last checkpoints, each a Hugging Face folder
RUN/evaluations/    results
RUN/lock, RUN/status.json   who has it, and what became of it: see `claim`
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer

from meanbank.core.files import discard, read_json, write_json, write_text
from meanbank.core.provenance import produced_by
from meanbank.data import Corpus, RecallBatches, TextBatches, prepare_corpus
from meanbank.data.tokenizer import load_tokenizer
from meanbank.evaluation import Subject
from meanbank.evaluation.windows import window_starts
from meanbank.model import MeanbankForCausalLM
from meanbank.training.checkpoint import TOKENIZER, TRAINER, checkpoints, damage_told
from meanbank.training.claim import LOCK
from meanbank.training.config import FREE_SETTINGS, RunConfig, load_config

CONFIG, RUN, METRICS = "config.yaml", "run.json", "metrics.jsonl"
STATISTICS = "statistics.jsonl"
TOLD = 4  # settings that differ, in one line


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Batches by step, and the corpus behind them (None for the recall source).

    vocab_size: the model's, padded (`data.pad_vocab_to`); all token ids are below the corpus's own.
    """

    batches: TextBatches | RecallBatches
    corpus: Corpus | None
    vocab_size: int
    description: dict[str, Any]

    @property
    def end_of_text_id(self) -> int | None:
        return None if self.corpus is None else self.corpus.end_of_text_id


def open_data(config: RunConfig) -> TrainingData:
    """Prepare the data of a run; builds a corpus on first use."""
    data, training = config.data, config.training
    if data.recall is not None:
        batches = RecallBatches(
            data.recall, batch_size=data.batch_size, seed=training.seed, steps=training.steps
        )
        vocab_size = data.padded(data.recall.vocab_size)
        return TrainingData(batches, None, vocab_size, {"source": data.source})
    corpus = prepare_corpus(data)
    window_starts(len(corpus.held_out.tokens), data.sequence_length, None)  # raises where too short
    batches = TextBatches(
        [part.train for part in corpus.parts],
        sequence_length=data.sequence_length,
        batch_size=data.batch_size,
        seed=training.seed,
        end_of_text_id=corpus.end_of_text_id,
        pack=data.pack,
        turns=[part.turns for part in corpus.parts],
        stages=data.stages(training.steps),
    )
    description = {**corpus.description, "fingerprint": corpus.fingerprint}
    return TrainingData(batches, corpus, data.padded(corpus.vocab_size), description)


def check_free(run: Path, *, force: bool) -> None:
    """Raise ValueError when something stands where a new run is to go.

    `force` lets an earlier run be replaced, and only that.
    """
    if run.is_dir() and not _content(run):
        return
    if not run.exists():
        return
    if not force:
        raise ValueError(
            f"{run} exists already: give another --out, --resume to go on with that run, or "
            "--force to replace it"
        )
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not a run folder, so --force does not replace it")


def make_run(run: Path, config: RunConfig, *, force: bool) -> None:
    """Begin a new run in a claimed folder; see `check_free`."""
    check_free(run, force=force)
    # The configuration last: without it, what a crash leaves would not be a run to replace.
    for path in sorted(_content(run), key=lambda path: path.name == CONFIG):
        discard(path)
    write_config(run, config)


def _content(run: Path) -> list[Path]:
    """What is in a folder besides its lock and what was left aside."""
    return [p for p in run.iterdir() if p.name != LOCK and not p.match(".*.tmp")]


def write_config(run: Path, config: RunConfig) -> None:
    text = yaml.safe_dump(config.plain(), sort_keys=False, allow_unicode=True)
    write_text(run / CONFIG, text)


def check_resumable(run: Path, config: RunConfig) -> None:
    """Raise ValueError unless `run` was made from the same configuration.

    `FREE_SETTINGS` may differ.
    """
    ours, theirs = (_settings(found.plain()) for found in (config, read_config(run)))
    names = [name for name in {**theirs, **ours} if name not in FREE_SETTINGS]
    found = [
        f"{name} = {theirs.get(name)!r}, not {ours.get(name)!r}"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]
    if found:
        more = f" and {len(found) - TOLD} more" if len(found) > TOLD else ""
        raise ValueError(f"cannot resume {run}: it was made with {', '.join(found[:TOLD])}{more}")


def _settings(plain: Any, path: str = "") -> dict[str, Any]:
    """Values of a plain configuration by dotted name; lists are values."""
    if not isinstance(plain, dict):
        return {path: plain}
    found = {}
    for name, value in plain.items():
        found |= _settings(value, f"{path}.{name}" if path else str(name))
    return found


def config_hash(config: RunConfig) -> str:
    """sha256 of a configuration without what may change when a run is resumed."""
    settings = _settings(config.plain())
    fixed = {name: value for name, value in settings.items() if name not in FREE_SETTINGS}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode("utf-8")).hexdigest()


def check_same_data(run: Path, data: TrainingData) -> None:
    """Raise ValueError when the data has changed since the run was started."""
    if not (run / RUN).is_file():  # stopped before anything was trained
        return
    saved = run_info(run)["data"].get("fingerprint")
    now = data.description.get("fingerprint")
    if saved != now:
        raise ValueError(
            f"the data of {run} has changed since it was started (fingerprint {str(saved)[:12]}, "
            f"now {str(now)[:12]}); restore it, or start a new run"
        )


def run_info(run: Path) -> dict[str, Any]:
    """What `run.json` holds; ValueError when it is not one of ours."""
    info = read_json(run / RUN)
    if not isinstance(info, dict) or not isinstance(info.get("data"), dict):
        raise ValueError(f"{run / RUN} is not the description of a run")
    return info


def read_config(run: Path) -> RunConfig:
    """The configuration of a run; ValueError when the folder is not one."""
    if not (run / CONFIG).is_file():
        if (run / TRAINER).is_file():
            raise ValueError(f"{run} is a checkpoint; give its run, {run.parent.parent}")
        if (run / "config.json").is_file():
            raise ValueError(
                f"{run} is a model, not a run: load it with AutoModelForCausalLM.from_pretrained"
            )
        raise ValueError(
            f"{run} is not a run folder (it has no {CONFIG}); `meanbank train CONFIG --out {run}` "
            "makes one"
        )
    return load_config(run / CONFIG)


def choose_device(name: str) -> str:
    """ "auto" is the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device is to be cuda, but PyTorch sees no GPU here; use auto or cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run's model, in evaluation mode, and what belongs to it."""

    path: Path
    config: RunConfig
    model: MeanbankForCausalLM
    tokenizer: Tokenizer | None
    info: dict[str, Any]
    step: int
    bank_storage: str = "resident"

    def corpus(self) -> Corpus:
        """What it was trained on, prepared; ValueError where that has changed since."""
        corpus = prepare_corpus(self.config.data)
        trained_on = self.info["data"].get("fingerprint")
        if corpus.fingerprint != trained_on:
            raise ValueError(
                f"the data of {self.path} has changed since it was trained (fingerprint "
                f"{str(trained_on)[:12]}, now {corpus.fingerprint[:12]}), so its held-out split is "
                "not the same"
            )
        return corpus

    def subject(self, open_corpus: Callable[[], Corpus] | None = None) -> Subject:
        """The model as evaluations take it, on other texts than its own if `open_corpus` is set."""
        own = subject_of(self.config, self.model, None)
        corpus = open_corpus or (self.corpus if own.recall is None else None)
        return dataclasses.replace(
            own, name=str(self.path), tokenizer=self.tokenizer, open_corpus=corpus
        )


def subject_of(config: RunConfig, model: MeanbankForCausalLM, corpus: Corpus | None) -> Subject:
    """A model of this configuration as evaluations take it."""
    data = config.data
    return Subject(
        name=config.description or "the model",
        model=model,
        tokenizer=None if corpus is None else corpus.tokenizer,
        training_length=data.sequence_length,
        open_corpus=None if corpus is None else lambda: corpus,
        isolated=data.isolated,
        recall=data.recall,
    )


def load_run(run: str | Path, device: str = "auto", bank_storage: str = "resident") -> LoadedRun:
    """Load the last checkpoint of a run onto "auto" (a GPU where there is one), "cpu" or "cuda".

    bank_storage: where its tables are, see `MeanbankForCausalLM.from_pretrained`.
    Raises ValueError when the folder is not a run or holds no checkpoint yet.
    """
    run = Path(run)
    config = read_config(run)
    found = checkpoints(run)
    if not found:
        raise ValueError(f"{run} holds no checkpoint yet; train it, or go on with --resume")
    with damage_told(found[-1]):
        model = MeanbankForCausalLM.from_pretrained(
            found[-1], local_files_only=True, bank_storage=bank_storage
        )
    tokenizer = load_tokenizer(found[-1]) if (found[-1] / TOKENIZER).is_file() else None
    info = run_info(run)
    step = int(found[-1].name.split("-")[1])
    model.to(choose_device(device))  # pyright: ignore[reportArgumentType]
    return LoadedRun(run, config, model.eval(), tokenizer, info, step, bank_storage)


def load_model(
    folder: str | Path, device: str = "auto", bank_storage: str = "resident"
) -> tuple[MeanbankForCausalLM, Tokenizer | None]:
    """The model and tokenizer of a run, see `load_run`, or of a plain Hugging Face folder."""
    folder = Path(folder)
    if not (folder / "config.json").is_file() or (folder / TRAINER).is_file():
        loaded = load_run(folder, device, bank_storage)
        return loaded.model, loaded.tokenizer
    with damage_told(folder):
        model = MeanbankForCausalLM.from_pretrained(
            folder, local_files_only=True, bank_storage=bank_storage
        )
    model.to(choose_device(device))  # pyright: ignore[reportArgumentType]
    tokenizer = load_tokenizer(folder) if (folder / TOKENIZER).is_file() else None
    return model.eval(), tokenizer


def write_run_info(
    run: Path,
    config: RunConfig,
    model: MeanbankForCausalLM,
    data: TrainingData,
    ceiling: float | None = None,
) -> None:
    """Write down what a run is trained with, and on what; ceiling: of `Pace`, where measured."""
    facts = produced_by(
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        seed=config.training.seed,
    )
    tokens = config.data.batch_size * config.data.sequence_length * config.training.steps
    info = {
        **facts,
        "description": config.description,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": config.training.steps,
        "sequence_length": config.data.sequence_length,
        "tokens": None if data.corpus is None else tokens,
        "ceiling_flops_per_second": ceiling,
        "data": data.description,
    }
    write_json(run / RUN, info)
