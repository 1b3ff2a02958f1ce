"""Tasks of the lm-evaluation-harness, through its own API."""

import dataclasses
import difflib
import functools
import hashlib
import math
import numbers
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from meanbank.core.config import check_least
from meanbank.data import end_of_text_id
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, prompt_hash
from meanbank.model import batch_invariant

NEEDED = "this needs lm_eval: pip install 'meanbank[eval]'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness(Evaluation, tag="harness"):
    """lm_eval's own numbers for tasks or groups of its own, or of a folder's YAML files.

    tasks: their names. include_path: a folder of task files, which may refer to code of their own;
    with it and no other task nothing is downloaded but what they ask for. limit: documents a task,
    default all. num_fewshot: default the task's own. max_length: of an input; default what lm_eval
    takes, 2048 where the model's configuration sets none. seed: of few-shot examples, and of
    generators of random numbers. The subject's prefix comes before every prompt.

    Each task is a call of its own to `lm_eval.simple_evaluate`, whose numbers and standard errors
    are kept as they are. The score of a task is its first metric; all of them have one by name.
    """

    tasks: tuple[str, ...]
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    max_length: int | None = None
    batch_size: int = 8
    seed: int = 1234

    def __post_init__(self) -> None:
        check_least(self, 1, "limit", "max_length", "batch_size")
        check_least(self, 0, "num_fewshot")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks needs distinct names, got {list(self.tasks)}")

    @functools.cached_property
    def manager(self) -> Any:
        """lm_eval's index of tasks: those of the folder where they suffice, since all take long."""
        try:
            from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(f"{NEEDED} ({error})") from None
        if self.include_path is not None:
            if not Path(self.include_path).is_dir():
                raise ValueError(f"no folder of tasks at {self.include_path}")
            local = TaskManager(include_path=self.include_path, include_defaults=False)
            if set(self.tasks) <= set(local.all_tasks):
                return local
        return TaskManager(include_path=self.include_path)

    def inputs(self) -> dict[str, Any]:
        files = [] if self.include_path is None else sorted(Path(self.include_path).rglob("*"))
        digest = hashlib.sha256()
        for file in files:
            if file.is_file():
                digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
        return {"lm_eval": version("lm_eval"), "tasks": digest.hexdigest() if files else None}

    def samples(self, subject: Subject) -> Sequence[Sample]:
        for name in self.tasks:
            if name not in self.manager.all_tasks:
                near = difflib.get_close_matches(name, self.manager.all_tasks)
                hint = f"; near it are {', '.join(near)}" if near else ""
                raise ValueError(f"lm_eval knows no task {name!r}{hint}")
        subject.text_tokenizer()
        return [Sample(id=name, content=name) for name in self.tasks]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        return [self._record(self._evaluated(subject, sample.content)) for sample in samples]

    def _evaluated(self, subject: Subject, task: str) -> dict[str, Any]:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

        model = HFLM(
            pretrained=subject.model,
            tokenizer=wrapped_tokenizer(subject.text_tokenizer(), subject.prefix),
            batch_size=self.batch_size,
            max_length=self.max_length,
            add_bos_token=bool(subject.prefix),
        )
        with batch_invariant():
            return lm_eval.simple_evaluate(
                model,
                tasks=[task],
                task_manager=self.manager,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                random_seed=self.seed,
                numpy_random_seed=self.seed,
                torch_random_seed=self.seed,
                fewshot_random_seed=self.seed,
            )

    def _record(self, found: dict[str, Any]) -> Record:
        documents = {task: _documents(logged) for task, logged in found["samples"].items()}
        prompts = [d["prompt"] for of in documents.values() for d in of]
        names = ("results", "versions", "n-shot", "n-samples", "configs", "higher_is_better")
        record = {
            "prompt": prompt_hash(" ".join(prompts)),
            "lm_eval": {name: _plain(found.get(name, {})) for name in names},
            "config": _plain({**found["config"], "max_length": found.get("max_length")}),
            "lm_eval_version": version("lm_eval"),
            "documents": documents,
        }
        return {**record, "scores": self.scores({"tasks": list(_rows(record["lm_eval"]))})}

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        return {
            "tasks": [row for record in records for row in _rows(record["lm_eval"])],
            "lm_eval_version": records[0]["lm_eval_version"],
            "config": records[0]["config"],
            "lm_eval": {
                name: {k: v for record in records for k, v in record["lm_eval"][name].items()}
                for name in records[0]["lm_eval"]
            },
        }

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in results["tasks"]:
            if row["value"] is None:
                continue
            name = f"{self.title}:{row['task']}"
            suffix = "" if row["filter"] == "none" else f".{row['filter']}"
            found.setdefault(name, row["value"])  # the first one is the task's main metric
            found[f"{name}:{row['metric']}{suffix}"] = row["value"]
        return found


def wrapped_tokenizer(
    tokenizer: Tokenizer, prefix: tuple[int, ...] = ()
) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it; `prefix` is added where special tokens are.

    Raises ValueError where it has no end-of-text token.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens
    end = tokenizer.id_to_token(end_of_text_id(tokenizer))
    special = {"eos_token": end, "pad_token": end, "padding_side": "left"}
    if prefix:
        tokens = [tokenizer.id_to_token(number) for number in prefix]
        pieces = list(dict(zip(tokens, prefix, strict=True)).items())
        copy.post_processor = TemplateProcessing(single=[*tokens, "$A"], special_tokens=pieces)
        special["bos_token"] = tokens[-1]
    as_text = copy.encode_special_tokens  # transformers sets it anew at every call
    return PreTrainedTokenizerFast(tokenizer_object=copy, split_special_tokens=as_text, **special)


def _rows(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each task, metric and filter, in lm_eval's order."""
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, _, of = key.partition(",")
            if not of or metric.endswith("_stderr"):
                continue
            yield {
                "task": task,
                "metric": metric,
                "filter": of,
                "value": _number(value),
                "stderr": _number(values.get(f"{metric}_stderr,{of}")),
                "fewshot": found["n-shot"].get(task),
                "documents": found["n-samples"].get(task, {}).get("effective"),
            }


def _documents(logged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each document scored, by metric."""
    return [
        {
            "id": document["doc_id"],
            "filter": document["filter"],
            "prompt": document["prompt_hash"],
            **{name: _plain(document.get(name)) for name in document["metrics"]},
        }
        for document in logged
    ]


def _number(value: Any) -> float | None:
    """None for "N/A" and for what is no finite number."""
    return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """As JSON values: text for what JSON cannot say, None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _number(value) if isinstance(value, numbers.Real) else str(value)
