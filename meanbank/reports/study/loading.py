"""From the folder of a study to its results."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meanbank.reports.files import (
    as_count,
    as_number,
    as_object,
    as_objects,
    read_json_lines,
    read_object,
)
from meanbank.reports.study.results import (
    Absent,
    Arm,
    Claim,
    Comparison,
    Evaluation,
    Group,
    Job,
    NotTestable,
    Step,
    Study,
)


def load_study(folder: Path | str) -> Study:
    """Read what a study left in its folder: whatever of it is there.

    Raises ValueError for a folder without a study and for a file that is not JSON or YAML.
    """
    folder = Path(folder)
    plan = _plan(folder / "study.yaml")
    verdicts = read_object(folder / "verdicts.json")
    lines = read_json_lines(folder / "results.jsonl")
    seeds, tuning_seeds = _seeds(plan.get("seeds")), _seeds(plan.get("tuning_seeds"))
    compared = _comparisons(verdicts)
    plans = {str(name): as_object(group) for name, group in as_object(plan.get("groups")).items()}
    arms = {name: _arms(folder, name, group, lines, seeds) for name, group in plans.items()}
    every = {arm.name: arm for found in arms.values() for arm in found}
    groups = tuple(
        Group(
            name=name,
            label=said(group.get("label")) or name,
            arms=arms[name],
            reference=every.get(said(group.get("reference")), next(iter(arms[name]), None)),
            match=group.get("match"),
            comparisons=tuple(compared.get(name, ())),
        )
        for name, group in plans.items()
    )
    return Study(
        name=said(plan.get("name")) or "study.yaml",
        title=said(plan.get("title")) or "A study",
        description=said(plan.get("description")),
        seeds=seeds,
        tuning_seeds=tuning_seeds,
        groups=groups,
        claims=claims_of(verdicts),
        not_testable=not_testable_of(plan),
        rule=said(verdicts.get("rule")),
        outcomes=outcomes_of(verdicts),
        absent=tuple(_absent(folder, groups)),
    )


def _plan(path: Path) -> dict[str, Any]:
    try:
        content = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no study in {path.parent}: it has no {path.name}") from None
    try:
        return as_object(yaml.safe_load(content))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML ({reason}); run the study again") from error


def said(value: Any) -> str:
    """As text; nothing for None."""
    return "" if value is None else str(value).strip()


def _seeds(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else []
    return tuple(seed for item in listed if (seed := as_count(item)) is not None)


def _arms(
    folder: Path,
    group: str,
    plan: dict[str, Any],
    lines: list[dict[str, Any]],
    seeds: tuple[int, ...],
) -> tuple[Arm, ...]:
    found = []
    for arm, settings in as_object(plan.get("arms")).items():
        mine = [one for one in lines if (one.get("group"), one.get("arm")) == (group, arm)]
        found.append(_arm(folder, str(arm), as_object(settings), mine, seeds))
    return tuple(found)


def _arm(
    folder: Path,
    name: str,
    plan: dict[str, Any],
    lines: list[dict[str, Any]],
    seeds: tuple[int, ...],
) -> Arm:
    jobs: dict[bool, dict[int, Job]] = {False: {}, True: {}}
    for line in lines:
        seed = as_count(line.get("seed"))
        if seed is not None:  # a job that was done again: the later line counts
            jobs[bool(line.get("tuning"))][seed] = _job(folder, name, seed, line)
    labels = [said(line.get("label")) for line in lines]
    label = said(plan.get("label")) or next((one for one in labels if one), "") or name
    counted, tuning = (tuple(found[seed] for seed in sorted(found)) for found in jobs.values())
    settings = as_object(plan.get("config"))
    return Arm(
        name=name,
        label=label,
        is_trained_here=not settings or "training" in settings,
        config=said(plan.get("config_name")),
        seeds=_seeds(plan.get("seeds")) or seeds,
        jobs=counted,
        tuning=tuning,
    )


def _job(folder: Path, arm: str, seed: int, line: dict[str, Any]) -> Job:
    seconds = as_object(line.get("seconds"))
    run = folder / "runs" / arm / f"seed-{seed}"
    found = (
        _evaluation(folder, title, file)
        for title, file in as_object(line.get("evaluations")).items()
    )
    return Job(
        seed=seed,
        overrides=line.get("overrides"),
        matched=line.get("matched"),
        parameters=as_count(line.get("parameters")),
        tokens=as_count(line.get("tokens")),
        flops=as_number(line.get("flops")),
        training_seconds=as_number(seconds.get("training")),
        evaluation_seconds=as_number(seconds.get("evaluation")),
        scores=_numbers(line.get("scores")),
        evaluations={one.title: one for one in found if one is not None},
        produced_by=as_object(line.get("produced_by")),
        model=as_object(line.get("model")),
        run=read_object(run / "run.json") if _inside(folder, run) else {},
        steps=_steps(run / "metrics.jsonl") if _inside(folder, run) else (),
    )


def _inside(folder: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _evaluation(folder: Path, title: str, file: Any) -> Evaluation | None:
    path = folder / file if isinstance(file, str) else None
    if path is None or not _inside(folder, path):
        return None
    record = read_object(path)
    if not record:
        return None
    return Evaluation(
        title=title,
        task=said(record.get("task")),
        settings=as_object(record.get("settings")),
        results=as_object(record.get("results")),
        produced_by=as_object(record.get("produced_by")),
        bos_policy=said(record.get("bos_policy")) or None,
        prompt_hash=said(record.get("prompt_hash")) or None,
    )


def _numbers(value: Any) -> dict[str, float]:
    found = {str(name): as_number(one) for name, one in as_object(value).items()}
    return {name: one for name, one in found.items() if one is not None}


def _steps(path: Path) -> tuple[Step, ...]:
    """The lines of each step put together; seconds go on where a run was taken up again."""
    steps: dict[int, dict[str, float]] = {}
    before = last = 0.0
    for line in read_json_lines(path):
        step, seconds = as_count(line.get("step")), as_number(line.get("seconds"))
        if step is None:
            continue
        found = steps.setdefault(step, {})
        if seconds is not None:
            before += last if seconds < last else 0.0
            last = seconds
            found["seconds"] = before + seconds
        for name, field in (("loss", "loss"), ("held_out_bpb", "held_out"), ("tokens", "tokens")):
            value = as_number(line.get(name))
            if value is not None:
                found[field] = value
    return tuple(Step(step=step, **steps[step]) for step in sorted(steps))


def claims_of(record: Mapping[str, Any]) -> tuple[Claim, ...]:
    """The claims of `verdicts.json`, or of a page's `claims.json`."""
    return tuple(map(_claim, as_objects(record.get("claims"))))


def not_testable_of(record: Mapping[str, Any]) -> tuple[NotTestable, ...]:
    """Those of `study.yaml`, or of a page's `claims.json`."""
    names = ("says", "source", "why")
    return tuple(
        NotTestable(**{name: said(one.get(name)) for name in names})
        for one in as_objects(record.get("not_testable"))
    )


def outcomes_of(record: Mapping[str, Any]) -> dict[str, str]:
    """What outcomes mean, as `verdicts.json` or a page's `claims.json` has it."""
    return {str(name): said(text) for name, text in as_object(record.get("outcomes")).items()}


def _claim(record: Mapping[str, Any]) -> Claim:
    verdict = said(record.get("verdict")) or "not measured"
    notes = record.get("notes")
    late = (
        ("added or changed when there were results already",) if record.get("added") is True else ()
    )
    return Claim(
        name=said(record.get("claim")),
        says=said(record.get("says")),
        source=said(record.get("source")),
        verdict=verdict,
        outcome=said(record.get("outcome")) or verdict,
        each=record.get("each") is True,
        expected=said(record.get("expected")),
        mean=as_number(record.get("mean")),
        interval=_interval(record.get("interval")),
        interval_kind=said(as_object(record.get("interval")).get("kind")),
        bootstrap=_interval(record.get("bootstrap")),
        p=as_number(record.get("p")),
        p_holm=as_number(record.get("p_holm")),
        threshold=as_number(record.get("threshold")),
        direction=said(record.get("direction")),
        values=_numbers(record.get("values")),
        tuning_values=_numbers(record.get("tuning_values")),
        notes=(*late, *map(said, notes if isinstance(notes, list) else ())),
    )


def _interval(value: Any) -> tuple[float, float] | None:
    """(low, high), where both are there."""
    ends = as_object(value)
    low, high = as_number(ends.get("low")), as_number(ends.get("high"))
    return None if low is None or high is None else (low, high)


def _comparisons(verdicts: dict[str, Any]) -> dict[str, list[Comparison]]:
    """By group."""
    found: dict[str, list[Comparison]] = {}
    for record in as_objects(verdicts.get("comparisons")):
        counts = {name: as_count(record.get(name)) for name in ("items", "wins", "ties", "losses")}
        mean, interval = as_number(record.get("difference")), _interval(record.get("interval"))
        if mean is None or interval is None or not all(v is not None for v in counts.values()):
            continue
        one = Comparison(
            arm=said(record.get("first")),
            against=said(record.get("second")),
            score=said(record.get("score")),
            **{name: count or 0 for name, count in counts.items()},
            mean=mean,
            low=interval[0],
            high=interval[1],
            p_holm=as_number(record.get("p_holm")),
        )
        if one.items:
            found.setdefault(said(record.get("group")), []).append(one)
    return found


def _absent(folder: Path, groups: tuple[Group, ...]) -> Iterator[Absent]:
    for group in groups:
        for arm in group.arms:
            done = {job.seed for job in arm.jobs}
            for seed in arm.seeds:
                if seed in done:
                    continue
                path = folder / "runs" / arm.name / f"seed-{seed}" / "failure.json"
                failure = read_object(path) if _inside(folder, path) else {}
                yield Absent(group=group.name, arm=arm.name, seed=seed, reason=_reason(failure))


def _reason(failure: dict[str, Any]) -> str | None:
    if not failure:
        return None
    return said(failure.get("message")) or "it did not say why"
