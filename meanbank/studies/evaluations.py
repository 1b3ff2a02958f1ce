"""Evaluation tasks by name, on a run, with results in RUN/evaluations/TASK.json."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from meanbank.core.config import choose
from meanbank.core.files import write_json
from meanbank.core.provenance import produced_by
from meanbank.data import Corpus, prepare_corpus
from meanbank.evaluation import (
    bits_per_byte,
    decode_speed,
    memory_at_contexts,
    position_loss,
    recall_accuracy,
)
from meanbank.training import LoadedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """See `meanbank evaluate --help`."""

    max_tokens: int | None = None
    max_documents: int | None = None
    multiple: int | None = None
    context: int = 8192
    sequences: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")


def _corpus(run: LoadedRun, task: str) -> Corpus:
    if run.config.data.recall is not None:
        raise ValueError(f"{run.path} was trained on the recall source; {task} needs a text source")
    corpus = prepare_corpus(run.config.data)
    trained_on = run.info["data"].get("fingerprint")
    if corpus.fingerprint != trained_on:
        raise ValueError(
            f"the data of {run.path} has changed since it was trained (fingerprint "
            f"{str(trained_on)[:12]}, now {corpus.fingerprint[:12]}), so its held-out split is "
            "not the same"
        )
    return corpus


def _bpb(run: LoadedRun, settings: EvaluationSettings) -> dict[str, Any]:
    corpus = _corpus(run, "bpb")
    return bits_per_byte(
        run.model,
        corpus.held_out,
        corpus.token_bytes,
        sequence_length=run.config.data.sequence_length,
        max_tokens=settings.max_tokens,
    )


def _position_loss(run: LoadedRun, settings: EvaluationSettings) -> dict[str, Any]:
    return position_loss(
        run.model,
        _corpus(run, "position-loss").held_out,
        training_length=run.config.data.sequence_length,
        multiple=settings.multiple,
        max_documents=settings.max_documents,
    )


def _recall(run: LoadedRun, settings: EvaluationSettings) -> dict[str, Any]:
    config = run.config.data.recall
    if config is None:
        raise ValueError(
            f"{run.path} was trained on {run.config.data.source}; recall needs a run trained on "
            "data.source = recall"
        )
    return recall_accuracy(run.model, config, sequences=settings.sequences)


def _memory(run: LoadedRun, settings: EvaluationSettings) -> dict[str, Any]:
    return memory_at_contexts(run.model)


def _decode_speed(run: LoadedRun, settings: EvaluationSettings) -> dict[str, Any]:
    return decode_speed(run.model, context=settings.context)


TASKS: dict[str, Callable[[LoadedRun, EvaluationSettings], dict[str, Any]]] = {
    "bpb": _bpb,
    "position-loss": _position_loss,
    "recall": _recall,
    "memory": _memory,
    "decode-speed": _decode_speed,
}
TEXT_TASKS, RECALL_TASKS = ("bpb", "position-loss", "memory"), ("recall", "memory")


def _fitting_tasks(run: LoadedRun) -> Sequence[str]:
    if run.config.data.recall is not None:
        return RECALL_TASKS
    longest = max(_corpus(run, "bpb").held_out.lengths)
    if longest < run.config.data.sequence_length:
        print("position-loss is left out: no held-out document is long enough", file=sys.stderr)
        return [task for task in TEXT_TASKS if task != "position-loss"]
    return TEXT_TASKS


def evaluate_run(
    run: LoadedRun, tasks: Sequence[str], settings: EvaluationSettings
) -> Iterator[dict[str, Any]]:
    """Run tasks one after another; each result is written to its file and yielded.

    No tasks means those that fit the run and its held-out documents. Raises ValueError for an
    unknown task, before any work, and for one that does not fit.
    """
    if not tasks:
        tasks = _fitting_tasks(run)
    for task in tasks:
        choose("task", task, TASKS)
    for task in tasks:
        device, dtype = str(run.model.device), str(run.model.dtype).removeprefix("torch.")
        seed = run.config.training.seed
        result = {
            "task": task,
            "run": str(run.path),
            "step": run.step,
            "bank_storage": run.bank_storage,
            "settings": dataclasses.asdict(settings),
            "produced_by": produced_by(device=device, dtype=dtype, seed=seed),
            "bos_policy": "none: texts are read as they are",
            "data": run.info["data"],
            "results": TASKS[task](run, settings),
        }
        name = task if run.bank_storage == "resident" else f"{task}-{run.bank_storage}"
        write_json(run.path / "evaluations" / f"{name}.json", result)
        yield result
