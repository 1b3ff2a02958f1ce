"""Tiny folders of CORE tasks."""

import json
from pathlib import Path

import yaml

CHOICES = [
    {"query": f"the price of {thing} is", "choices": ["one", "two hundred", "ten"], "gold": i % 3}
    for i, thing in enumerate(["tea", "a hat", "milk", "ten cats", "one hat", "water"])
]
SCHEMA = [
    {
        "context_options": [f"the cat saw the {thing} and the cat", f"a cat saw and the {thing}"],
        "continuation": "ran away",
        "gold": i % 2,
    }
    for i, thing in enumerate(["dog", "mouse", "owl", "man"])
]
LANGUAGE = [
    {"context": f" the {thing} is in the ", "continuation": "big house"}
    for thing in ("dog", "mouse", "owl", "hat", "tea")
]
FILES = {
    "a/pick.jsonl": CHOICES,
    "a/who.jsonl": SCHEMA,
    "b/end.jsonl": LANGUAGE,
}
TASKS = [
    {
        "label": "arc_easy",
        "dataset_uri": "a/pick.jsonl",
        "num_fewshot": [2],
        "icl_task_type": "multiple_choice",
        "continuation_delimiter": "\nAnswer: ",
    },
    {
        "label": "winograd",
        "dataset_uri": "a/who.jsonl",
        "num_fewshot": [0],
        "icl_task_type": "schema",
    },
    {
        "label": "boolq",
        "dataset_uri": "b/end.jsonl",
        "num_fewshot": [1],
        "icl_task_type": "language_modeling",
    },
]
WORDS = " ".join(json.dumps(item) for items in FILES.values() for item in items)


def make_folder(folder: Path, files=None, tasks=None) -> Path:
    """A folder with `core.yaml` (without one where tasks is empty) and the files of its tasks."""
    for name, items in (FILES if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
    tasks = TASKS if tasks is None else tasks
    if tasks:
        (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    return folder
