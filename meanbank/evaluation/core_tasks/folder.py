"""A folder of CORE tasks in the layout of DCLM and LLM-Foundry: read and checked."""

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meanbank.core.config import build, choose
from meanbank.core.files import read_json
from meanbank.evaluation.core_tasks.kinds import KINDS, Item, Kind

CONFIGS = ("core.yaml", "tasks.json")  # of the published bundle; a list of `TaskSpec` fields
BASELINES_FILE = "eval_meta_data.csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a folder's configuration says of a task.

    file: JSON lines, relative to the folder or its `eval_data`. kind: a name of `KINDS`. fewshot:
    answered examples in front of each question. delimiter: between a question and its answer.
    """

    name: str
    file: str
    kind: str
    fewshot: int
    delimiter: str = " "

    def __post_init__(self) -> None:
        choose(f"type of the CORE task {self.name}:", self.kind, KINDS)
        if self.fewshot < 0:
            raise ValueError(f"the CORE task {self.name} has {self.fewshot} few-shot examples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its items. sha256: of its file. baselines: {name of a set: accuracy}."""

    spec: TaskSpec
    items: list[Item]
    sha256: str
    baselines: dict[str, float]

    @property
    def kind(self) -> Kind:
        return KINDS[self.spec.kind]


_CATEGORIES = {
    "world_knowledge": ("jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge"),
    "commonsense_reasoning": ("copa", "commonsense_qa", "piqa", "openbook_qa"),
    "language_understanding": (
        "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_language_identification",
    ),
    "symbolic_problem_solving": (
        "bigbench_dyck_languages", "agi_eval_lsat_ar", "bigbench_cs_algorithms",
        "bigbench_operators", "bigbench_repeat_copy_logic",
    ),
    "reading_comprehension": ("squad", "coqa", "boolq"),
}  # fmt: skip
_FILES = {"jeopardy": "jeopardy_all", "winograd": "winograd_wsc"}
_CHOICES = {
    "arc_easy", "arc_challenge", "copa", "commonsense_qa", "piqa", "openbook_qa", "hellaswag",
    "agi_eval_lsat_ar", "boolq", "bigbench_language_identification",
}  # fmt: skip
_ANSWER = {"jeopardy", "arc_easy", "arc_challenge", "piqa", "boolq"}
_FEWSHOT = {
    "copa": 0, "openbook_qa": 0, "lambada_openai": 0, "winograd": 0, "winogrande": 0, "coqa": 0,
    "agi_eval_lsat_ar": 3,
}  # fmt: skip


def _standard(category: str, name: str) -> TaskSpec:
    kind = "schema" if name.startswith("winogra") else "language_modeling"
    return TaskSpec(
        name=name,
        file=f"{category}/{_FILES.get(name, name)}.jsonl",
        kind="multiple_choice" if name in _CHOICES else kind,
        fewshot=_FEWSHOT.get(name, 10),
        delimiter="\nAnswer: " if name in _ANSWER else " ",
    )


# The 21 tasks as DCLM sets them, for folders without a configuration.
STANDARD = {
    name: _standard(category, name) for category, names in _CATEGORIES.items() for name in names
}

# What differs from uniform chance. nanochat keeps the values that DCLM began with; DCLM has
# corrected them: they now are chance, or the share of the largest class where classes are unequal.
PUBLISHED = {
    "dclm": {"boolq": 0.62, "commonsense_qa": 0.403},
    "nanochat": {
        "boolq": 0.62,
        "commonsense_qa": 0.2,
        "agi_eval_lsat_ar": 0.2,
        "bigbench_language_identification": 0.091,
    },
    "chance": {},
}


def read_specs(folder: Path) -> dict[str, TaskSpec]:
    """The tasks that the folder's configuration lists, or DCLM's; ValueError for a malformed one.

    `core.yaml` is DCLM's (`icl_tasks`, each with `label`, `dataset_uri`, `num_fewshot`,
    `icl_task_type`, `continuation_delimiter`); `tasks.json` a list of objects with `task`, `file`
    (null where the task is missing), `fewshot`, `type`, `delimiter`.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder of CORE tasks at {folder}")
    for name, read in zip(CONFIGS, (_from_yaml, _from_json), strict=True):
        path = folder / name
        if path.is_file():
            try:
                specs = [build(TaskSpec, settings) for settings in read(path)]
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(f"{path} is not a list of CORE tasks: {error}") from None
            return {spec.name: spec for spec in specs}
    return STANDARD


def _from_yaml(path: Path) -> list[dict[str, Any]]:
    try:
        tasks = yaml.safe_load(path.read_text(encoding="utf-8"))["icl_tasks"]
    except yaml.YAMLError:
        raise ValueError("not valid YAML") from None
    return [
        {
            "name": task["label"],
            "file": task["dataset_uri"],
            "kind": task["icl_task_type"],
            "fewshot": task["num_fewshot"][0]
            if isinstance(task["num_fewshot"], list)
            else task["num_fewshot"],
            "delimiter": task.get("continuation_delimiter", " "),
        }
        for task in tasks
    ]


def _from_json(path: Path) -> list[dict[str, Any]]:
    return [
        {
            "name": task["task"],
            "file": task["file"],
            "kind": task["type"],
            "fewshot": task["fewshot"],
            "delimiter": task.get("delimiter", " "),
        }
        for task in read_json(path)
        if task["file"] is not None
    ]


def read_tasks(folder: Path, names: tuple[str, ...] | None) -> dict[str, Task]:
    """Tasks of a folder by name: those of `names`, or all whose files are there.

    Raises ValueError, in one line, for a task that is not there and for malformed files.
    """
    specs = read_specs(folder)
    files = {name: _file(folder, spec) for name, spec in specs.items()}
    there = [name for name, file in files.items() if file is not None]
    if not there:
        raise ValueError(f"{folder} holds no file of a CORE task, such as {_an_example(specs)}")
    for name in names or ():
        choose(f"CORE task in {folder}:", name, there)
    given = _given_baselines(folder)
    chosen = there if names is None else list(dict.fromkeys(names))
    return {name: _read_task(specs[name], files[name], given) for name in chosen}


def _an_example(specs: Mapping[str, TaskSpec]) -> str:
    return next((spec.file for spec in specs.values()), "world_knowledge/arc_easy.jsonl")


def _file(folder: Path, spec: TaskSpec) -> Path | None:
    """Its file, None where it is missing; ValueError where its name leads out of the folder."""
    for root in (folder, folder / "eval_data"):
        path = (root / spec.file).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"the file {spec.file!r} of {spec.name} is not inside {folder}")
        if path.is_file():
            return path
    return None


def _read_task(spec: TaskSpec, path: Path | None, given: dict[str, float]) -> Task:
    assert path is not None  # `there` has been checked
    content, kind, items = path.read_bytes(), KINDS[spec.kind], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            kind.check(item)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        items.append(item)
    if len(items) <= spec.fewshot:
        raise ValueError(
            f"{path} has {len(items)} items; {spec.name} needs one and {spec.fewshot} others as "
            "few-shot examples"
        )
    chance = sum(kind.chance(item) for item in items) / len(items)
    baselines = {name: values.get(spec.name, chance) for name, values in PUBLISHED.items()}
    if spec.name in given:
        baselines = {"folder": given[spec.name], **baselines}
    sha256 = hashlib.sha256(content).hexdigest()
    return Task(spec=spec, items=items, sha256=sha256, baselines=baselines)


def _given_baselines(folder: Path) -> dict[str, float]:
    """Shares of right answers by task, from DCLM's table of percents; empty without one."""
    path = folder / BASELINES_FILE
    if not path.is_file():
        return {}
    rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    try:
        found = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error):
        raise ValueError(
            f"{path} needs the columns 'Eval Task' and 'Random baseline', a number of percents"
        ) from None
    for name, share in found.items():
        if not 0 <= share < 1:
            raise ValueError(f"{path}: the baseline of {name} must be from 0 to below 100 %")
    return found
