"""What was run, for readers who want to run it again: each fact once, with all its values."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meanbank.reports.study.results import Arm, Evaluation, Group, Study
from meanbank.reports.wording import duration, grouped

_PRODUCED_BY = {
    "version": "meanbank",
    "commit": "Commit",
    "python": "Python",
    "torch": "PyTorch",
    "device": "Device",
    "machine": "Machine",
    "dtype": "Number type",
    "threads": "Threads",
}

Items = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A titled list of names and values."""

    title: str
    items: Items


def what_was_run(study: Study) -> list[Facts]:
    """Software and machine, then the arms, training and evaluations of each group."""
    facts = [
        Facts(title="Seeds", items=_seeds(study)),
        Facts(title="Software and machine", items=software(study)),
    ]
    for group in study.groups:
        facts += [
            Facts(title=f"{group.label}: arms", items=_arms(group)),
            Facts(title=f"{group.label}: training", items=_training(group)),
            Facts(title=f"{group.label}: evaluations", items=_evaluations(group)),
        ]
    return [one for one in facts if one.items]


def how_it_was_made(study: Study) -> list[Facts]:
    """Seeds, software, machine and time, without the settings of each group."""
    items = (*_seeds(study), *software(study), *_work(study))
    return [Facts(title="Seeds, software, machine, time", items=items)]


def _work(study: Study) -> Items:
    runs, seconds = work(study)
    return ("Runs", grouped(runs)), ("Computing time, one run after the other", duration(seconds))


def work(study: Study) -> tuple[int, float]:
    """How many runs a study has, and the seconds of training and evaluating all of them."""
    jobs = [job for g in study.groups for arm in g.arms for job in (*arm.jobs, *arm.tuning)]
    times = (time for job in jobs for time in (job.training_seconds, job.evaluation_seconds))
    return len(jobs), math.fsum(time for time in times if time)


def _seeds(study: Study) -> Items:
    if not study.has_seeds:
        return ()
    items = (("Counted", _values(study.seeds)), ("Tuning only", _values(study.tuning_seeds)))
    return tuple((name, value) for name, value in items if value)


def software(study: Study) -> Items:
    """What made the results: versions, and the machine."""
    made = [job.produced_by for job in study.jobs]
    made += [one.produced_by for job in study.jobs for one in job.evaluations.values()]
    return software_items(made)


def software_items(made: Sequence[Mapping[str, Any]]) -> Items:
    """Software and machine of results, each fact once with all its values."""
    found = ((name, _values(one.get(key) for one in made)) for key, name in _PRODUCED_BY.items())
    return tuple((name, value) for name, value in found if value)


def _arms(group: Group) -> Items:
    items = [("Matched", "" if group.match is None else _text(group.match))]
    items += [(arm.label, _arm(arm)) for arm in group.arms]
    return tuple((name, value) for name, value in items if value)


def _arm(arm: Arm) -> str:
    parts = [arm.config]
    for name in ("overrides", "matched"):
        flat = [_flattened(getattr(job, name), "") for job in arm.jobs]
        keys = dict.fromkeys(key for one in flat for key in one)
        found = ((key, _values(one.get(key) for one in flat)) for key in keys)
        said = "; ".join(f"{key} {value}".strip() for key, value in found if value)
        parts.append(f"{name}: {said}" if said else "")
    for job in arm.jobs[:1]:
        known = [f"{k} {_text(v)}" for k, v in job.model.items() if k != "name" and v is not None]
        parts += [f"not trained here: {', '.join(known)}"] if job.model else []
    return "; ".join(part for part in parts if part)


def _training(group: Group) -> Items:
    jobs = [job for arm in group.arms for job in arm.jobs if not job.model]
    runs = [job.run for job in jobs]
    items = [
        ("Models trained", str(len(jobs)) if jobs else ""),
        ("Parameters", _values(grouped(job.parameters) for job in jobs if job.parameters)),
        ("Tokens seen", _values(grouped(job.tokens) for job in jobs if job.tokens)),
        ("Steps", _values(run.get("steps") for run in runs)),
        ("Longest sequence", _values(run.get("sequence_length") for run in runs)),
    ]
    return (*((name, value) for name, value in items if value), *data_items(runs))


def data_items(runs: Sequence[Mapping[str, Any]]) -> Items:
    """What the files `run.json` of runs tell of their data."""
    flat = [_flattened(run.get("data"), "Data") for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    items = [(name, _values(one.get(name) for one in flat)) for name in names]
    return tuple((name, value) for name, value in items if value)


def _evaluations(group: Group) -> Items:
    found: dict[str, list[Evaluation]] = {}
    for arm in group.arms:
        for job in arm.jobs:
            for title, evaluation in job.evaluations.items():
                found.setdefault(title, []).append(evaluation)
    return tuple((title, _settings(evaluations)) for title, evaluations in found.items())


def _settings(evaluations: list[Evaluation]) -> str:
    flat = [_flattened(one.settings, "") for one in evaluations]
    # What differs from model to model, such as a path, is no setting of the comparison.
    common = {
        name: value
        for name, value in flat[0].items()
        if value is not None and all(one.get(name) == value for one in flat)
    }
    prompts = _values(one.prompt_hash for one in evaluations)
    texts = _values(one.bos_policy for one in evaluations)
    parts = [f"task {evaluations[0].task}"]
    parts += [f"{name} {_text(v)}" for name, v in common.items() if name not in ("type", "name")]
    parts += [f"prompts {prompts}"] if prompts else []
    parts += [f"begin of text: {texts}"] if texts else []
    return ", ".join(parts)


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
    return ", ".join(
        dict.fromkeys(_text(value) for value in values if value not in (None, "", [], {}))
    )


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return grouped(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
