"""What was run, for readers who want to run it again: each fact once, with all its values."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meanbank.reports.results import DemoResults, Evaluation, Run
from meanbank.reports.wording import grouped, short_count

_PRODUCED_BY = {
    "version": "meanbank",
    "commit": "Commit",
    "python": "Python",
    "torch": "PyTorch",
    "device": "Device",
    "dtype": "Number type",
    "threads": "Threads",
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A titled list of names and values."""

    title: str
    items: tuple[tuple[str, str], ...]


def what_was_run(results: DemoResults) -> list[Facts]:
    """Software and machine, training and data of both kinds of models, evaluation settings."""
    language = [arm.run for arm in results.language if arm.run]
    recall = [run.run for arm in results.recall for run in arm.runs if run.run]
    evaluations = [evaluation for arm in results.language for evaluation in arm.evaluations]
    evaluations += [
        evaluation for arm in results.recall for run in arm.runs for evaluation in run.evaluations
    ]
    groups = [
        Facts(title="Software and machine", items=_software([*language, *recall], evaluations)),
        Facts(title="Language models", items=_training(language)),
        Facts(title="Recall models", items=_training(recall)),
        Facts(title="Evaluation settings", items=_settings(evaluations)),
    ]
    return [group for group in groups if group.items]


def _software(runs: list[Run], evaluations: list[Evaluation]) -> tuple[tuple[str, str], ...]:
    made = [thing.produced_by for thing in (*runs, *evaluations)]
    found = ((name, _values(one.get(key) for one in made)) for key, name in _PRODUCED_BY.items())
    return tuple((name, value) for name, value in found if value)


def _training(runs: list[Run]) -> tuple[tuple[str, str], ...]:
    items = [
        ("Models trained", str(len(runs)) if runs else ""),
        ("Parameters", _values(_known(short_count, run.parameters) for run in runs)),
        ("Steps", _values(_known(grouped, run.steps) for run in runs)),
        ("Tokens seen", _values(_known(grouped, run.tokens) for run in runs)),
        ("Longest sequence", _values(_known(grouped, run.sequence_length) for run in runs)),
        ("Seeds", _values(sorted({run.seed for run in runs if run.seed is not None}))),
    ]
    flat = [_flattened(run.data, "Data") for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    items += [(name, _values(one.get(name) for one in flat)) for name in names]
    return tuple((name, value) for name, value in items if value)


def _settings(evaluations: list[Evaluation]) -> tuple[tuple[str, str], ...]:
    items = []
    for task in dict.fromkeys(evaluation.task for evaluation in evaluations):
        flat = [_flattened(one.settings, "") for one in evaluations if one.task == task]
        # What differs from model to model, such as a path, is no setting of the comparison.
        common = {name: value for name, value in flat[0].items() if _same(name, value, flat)}
        items.append((task, ", ".join(f"{name} {_text(value)}" for name, value in common.items())))
    return tuple((task, value) for task, value in items if value)


def _same(name: str, value: Any, flat: list[dict[str, Any]]) -> bool:
    return all(one.get(name) == value for one in flat)


def _known(say: Any, value: int | None) -> str | None:
    return None if value is None else say(value)


def _flattened(value: Any, name: str) -> dict[str, Any]:
    """Nested objects as dotted names: `{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    if not isinstance(value, Mapping):
        return {name: value}
    separator = ": " if name == "Data" else "."
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flattened(inner, f"{name}{separator}{key}" if name else str(key))
    return flat


def _values(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(_text(value) for value in values if value not in (None, "")))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
