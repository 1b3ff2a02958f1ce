"""Evaluations of a run or of any causal language model, with results in files."""

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from meanbank.core.config import apply_override, build, choose, to_plain
from meanbank.core.errors import one_line
from meanbank.core.files import write_json
from meanbank.core.provenance import produced_by
from meanbank.core.tensor_file import tensor_bytes
from meanbank.data import Corpus, DataConfig, load_tokenizer, prepare_corpus
from meanbank.data.encoder import plain
from meanbank.data.tokenizer import HUB
from meanbank.evaluation import Evaluation, Subject, run_evaluation
from meanbank.evaluation.serving import cost_at
from meanbank.model import MeanbankForCausalLM
from meanbank.model.fingerprint import model_fingerprint
from meanbank.studies.spec import Bos, check_evaluations
from meanbank.training import LoadedRun, load_run
from meanbank.training.checkpoint import TOKENIZER, TRAINER, checkpoints, damage_told
from meanbank.training.run import CONFIG, choose_device

FOLDER, RECORDS = "evaluations", ".records.jsonl"
LONGEST_WITHOUT_NAME = 8192  # a model's own limit is no training length beyond that


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A subject, the folder for its results, and what a result says of it besides.

    identity: tells its weights and texts, so that records are not mixed. suffix: of result files.
    """

    subject: Subject
    folder: Path
    facts: dict[str, Any]
    identity: str
    suffix: str = ""
    seed: int | None = None


def of_run(run: LoadedRun, data: str | None = None) -> Evaluated:
    """A run, evaluated on its own held-out texts, or on those of another source."""
    source = None if data is None else prepare_corpus(texts_of(data, checkpoints(run.path)[-1]))
    texts = run.info["data"] if source is None else source.description
    return Evaluated(
        subject=run.subject(None if source is None else lambda: source),
        folder=run.path / FOLDER,
        facts={
            "run": str(run.path),
            "step": run.step,
            "bank_storage": run.bank_storage,
            "config": run.config.plain(),
            "data": texts,
        },
        identity=f"{_weights(run.model)} {texts.get('fingerprint')}",
        suffix="" if run.bank_storage == "resident" else f"-{run.bank_storage}",
        seed=run.config.training.seed,
    )


def of_model(
    name: str, out: Path, device: str = "auto", data: str | None = None, bos: Bos = "none"
) -> Evaluated:
    """A causal language model of a Hugging Face folder, or `hf:NAME` of the hub.

    bos: "always" puts its begin-of-text token before every text. Only safetensors are read, and no
    code that comes with a model is run. Raises ValueError for what cannot be loaded.
    """
    place, options = place_of(name)
    with damage_told(Path(name)):
        config = AutoConfig.from_pretrained(place, **options)
        model = AutoModelForCausalLM.from_pretrained(
            place, config=config, use_safetensors=True, **options
        )
    model.to(choose_device(device))  # pyright: ignore[reportArgumentType]
    corpus = None if data is None else prepare_corpus(texts_of(data, name))
    texts = None if corpus is None else corpus.description
    identity = f"{_weights(model)} {corpus and corpus.fingerprint}"
    subject = _subject(name, model.eval(), corpus, bos)
    if subject.prefix:
        identity += f" bos {subject.prefix[0]}"
    return Evaluated(
        subject=subject,
        folder=out,
        facts={"model": name, "config": config.to_dict(), "data": texts},
        identity=identity,
    )


def outline_of_model(name: str, corpus: Corpus | None, bos: Bos = "none") -> Subject:
    """Such a model without weights; ValueError where there is none."""
    place, options = place_of(name)
    with damage_told(Path(name)):
        config = AutoConfig.from_pretrained(place, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return _subject(name, model, corpus, bos)


def place_of(name: str) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is called with; ValueError for a folder without a model."""
    place = name.removeprefix(HUB)
    if place == name and not (Path(name) / "config.json").is_file():
        if found := checkpoints(Path(name)):
            raise ValueError(f"{name} is a run: for its model give a checkpoint, {found[-1]}")
        raise ValueError(f"{name} is neither a run nor a model: it has no {CONFIG}, no config.json")
    return place, {"trust_remote_code": False, "local_files_only": place == name}


def _subject(name: str, model: PreTrainedModel, corpus: Corpus | None, bos: Bos) -> Subject:
    limit = getattr(model.config, "max_position_embeddings", None)
    prefix: tuple[int, ...] = ()
    if bos == "always":
        token = getattr(model.config, "bos_token_id", None)
        if token is None:
            raise ValueError(f"{name} has no begin-of-text token; leave bos out")
        prefix = (token,)
    return Subject(
        name=name,
        model=model,
        tokenizer=_tokenizer(*place_of(name)),
        training_length=None if limit is None else min(limit, LONGEST_WITHOUT_NAME),
        open_corpus=None if corpus is None else lambda: corpus,
        prefix=prefix,
    )


def open_evaluated(
    name: str,
    *,
    device: str = "auto",
    bank_storage: str = "resident",
    data: str | None = None,
    out: Path | None = None,
    bos: Bos = "none",
) -> Evaluated:
    """A run's folder, or a model's; see `of_run` and `of_model`.

    out: folder of results, default RUN/evaluations, for a model runs/NAME/evaluations. bos:
    "always" puts a model's begin-of-text token before every text.
    """
    folder = Path(name)
    is_model = name.startswith(HUB) or (
        (folder / "config.json").is_file() and not (folder / TRAINER).is_file()
    )
    if not is_model:
        if bos != "none":
            raise ValueError("runs have no begin-of-text token; --bos is for other models")
        found = of_run(load_run(folder, device, bank_storage), data)
        return found if out is None else dataclasses.replace(found, folder=out)
    if bank_storage != "resident":
        raise ValueError("--bank-storage is for runs; a model is loaded as it is")
    last = name.removeprefix(HUB).rstrip("/").split("/")[-1]
    return of_model(name, out or Path("runs") / last / FOLDER, device, data, bos)


def _tokenizer(place: str, options: dict[str, Any]) -> Any:
    """The model's, as the `tokenizers` package has it; None where it has none that is fast."""
    if (Path(place) / TOKENIZER).is_file():
        return load_tokenizer(place)
    try:
        return plain(AutoTokenizer.from_pretrained(place, **options).backend_tokenizer)
    except (OSError, ValueError, AttributeError, ImportError):
        return None


def texts_of(source: str, tokenizer: str | Path) -> DataConfig:
    """Texts of a source as a model's tokenizer cuts them; the split is that of every run."""
    return DataConfig(source=source, tokenizer=str(tokenizer))


def _weights(model: PreTrainedModel) -> str:
    """sha256 of a model's weights."""
    head = model.get_output_embeddings()
    if isinstance(model, MeanbankForCausalLM):
        tensors, first = ({} if head is None else head.state_dict()), model_fingerprint(model)
    else:
        tensors, first = model.state_dict(), ""
    digest = hashlib.sha256(first.encode("ascii"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor.cpu().contiguous()))
    return digest.hexdigest()


def read_tasks(names: Sequence[str], changes: Sequence[str]) -> list[Evaluation]:
    """Evaluations by name, with settings `TASK.SETTING=VALUE` (values are YAML).

    Raises ValueError for unknown tasks and settings, and for a task that is not among `names`.
    """
    settings: dict[str, Any] = {}
    for name in names:
        settings[choose("task", name, Evaluation.family)] = {"type": name}
    for change in changes:
        task = change.partition(".")[0]
        if task not in settings:
            raise ValueError(f"{change!r} is for the task {task!r}, which is not to be run")
        apply_override(settings, change)
    evaluations = [build(Evaluation, value, name) for name, value in settings.items()]
    check_evaluations(evaluations)
    return evaluations


def fitting_tasks(subject: Subject) -> list[str]:
    """What is evaluated where nobody names a task; ValueError where nothing fits."""
    ours = ["memory"] if isinstance(subject.model, MeanbankForCausalLM) else []
    if subject.recall is not None:
        return ["recall", *ours]
    if subject.open_corpus is None:
        raise ValueError(f"name what to evaluate {subject.name} by: --task, or texts with --data")
    lengths = subject.corpus.held_out.lengths
    long = subject.training_length is not None and lengths.max() >= subject.training_length
    return ["bpb", *(["position-loss"] if long else []), *ours]


def evaluate(
    evaluated: Evaluated, evaluations: Sequence[Evaluation], *, keep_records: bool = False
) -> Iterator[dict[str, Any]]:
    """Run evaluations one after another; each result is written to its file and yielded.

    Where scores are by length, `costs` tells what a context of each length costs: the bytes that
    are held after it, and tokens a second of reading it (whatever runs beside; the task `serving`
    measures with care). Records of single samples are in TITLE.records.jsonl while an evaluation
    runs, so that it can be taken up again, and afterwards where `keep_records` says so.
    """
    subject = evaluated.subject
    for evaluation in evaluations:
        name = evaluation.title + evaluated.suffix
        records = evaluated.folder / f"{name}{RECORDS}"
        started = time.monotonic()
        device, dtype = str(subject.model.device), str(subject.model.dtype)
        made_by = produced_by(
            device=device, dtype=dtype.removeprefix("torch."), seed=evaluated.seed
        )
        # others may measure otherwise
        how = f"{made_by['version']} {made_by['commit']} {device} {dtype}"
        outcome = run_evaluation(evaluation, subject, records, f"{evaluated.identity} {how}")
        result = {
            "task": evaluation.tag,
            "name": evaluation.title,
            **evaluated.facts,
            "settings": to_plain(evaluation),
            "identity": evaluated.identity,
            "produced_by": made_by,
            "bos_policy": subject.bos_policy,
            "prompt_hash": outcome.prompt_hash,
            "seconds": round(time.monotonic() - started, 3),
            "costs": [
                cost_at(outcome.subject.model, length)
                for length in evaluation.prompt_lengths(outcome.subject)
            ],
            "scores": outcome.scores,
            "results": outcome.results,
        }
        path = evaluated.folder / f"{name}.json"
        try:
            write_json(path, result)
        except ValueError as error:
            raise ValueError(f"{name} of {subject.name} is not finite: {one_line(error)}") from None
        if not keep_records:
            records.unlink(missing_ok=True)
        yield result
