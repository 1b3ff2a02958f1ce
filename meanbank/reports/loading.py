"""From the folder of a demo to its results."""

import re
from pathlib import Path
from typing import Any

from meanbank.reports.files import (
    as_count,
    as_number,
    as_object,
    as_objects,
    read_json,
    read_json_lines,
    read_object,
)
from meanbank.reports.results import (
    LANGUAGE_ARMS,
    RECALL_ARMS,
    Bigram,
    Bucket,
    Curve,
    DecodeSpeed,
    DemoResults,
    Evaluation,
    LanguageArm,
    MemoryUse,
    PositionLoss,
    RecallArm,
    RecallRun,
    Run,
    Sample,
)

PRODUCED_BY = ("version", "commit", "python", "torch", "device", "dtype", "threads")


def load_demo(folder: Path | str) -> DemoResults:
    """Read what `meanbank demo --out FOLDER` left: whatever of it is there.

    Raises ValueError for a folder without any results and for a file that is not JSON.
    """
    folder = Path(folder)
    results = DemoResults(
        folder=folder,
        language=tuple(
            _language_arm(folder / "language" / name, label)
            for name, label in LANGUAGE_ARMS.items()
        ),
        recall=tuple(
            _recall_arm(folder / "recall", name, label) for name, label in RECALL_ARMS.items()
        ),
        bigram=_bigram(folder / "bigram.json"),
        samples=_samples(folder / "samples.json"),
    )
    if not _holds_anything(results):
        raise ValueError(f"no results in {folder}: run `meanbank demo --out {folder}` first")
    return results


def _holds_anything(results: DemoResults) -> bool:
    language = any(arm.run or arm.evaluations for arm in results.language)
    recall = any(run.run or run.evaluations for arm in results.recall for run in arm.runs)
    return bool(language or recall or results.bigram or results.samples)


def _language_arm(folder: Path, label: str) -> LanguageArm:
    run = _run(folder)
    found = {
        task: evaluation
        for task in ("bpb", "position-loss", "memory", "decode-speed")
        if (evaluation := _evaluation(folder, task)) is not None
    }
    results = {task: evaluation.results for task, evaluation in found.items()}
    return LanguageArm(
        name=folder.name,
        label=(run.description if run else None) or label,
        run=run,
        bits_per_byte=as_number(results.get("bpb", {}).get("bpb")),
        position_loss=_position_loss(results.get("position-loss")),
        memory=_memory_use(results.get("memory")),
        decode_speed=_decode_speed(results.get("decode-speed")),
        evaluations=tuple(found.values()),
    )


def _recall_arm(folder: Path, name: str, label: str) -> RecallArm:
    runs = []
    for path in folder.glob(f"{name}-seed*"):
        match = re.fullmatch(rf"{re.escape(name)}-seed(\d+)", path.name)
        if match and path.is_dir():
            runs.append(_recall_run(path, int(match[1])))
    described = [run.run.description for run in runs if run.run and run.run.description]
    return RecallArm(
        name=name,
        label=min(described, default=label),
        runs=tuple(sorted(runs, key=lambda run: run.seed)),
    )


def _recall_run(folder: Path, seed: int) -> RecallRun:
    evaluation = _evaluation(folder, "recall")
    accuracy, queries = {}, {}
    for cell in as_objects(evaluation.results.get("grid")) if evaluation else []:
        length, pairs = as_count(cell.get("length")), as_count(cell.get("pairs"))
        value, asked = as_number(cell.get("accuracy")), as_count(cell.get("queries"))
        if length is None or pairs is None or value is None:
            continue
        accuracy[length, pairs] = value
        if asked is not None:
            queries[length, pairs] = asked
    return RecallRun(
        seed=seed,
        run=_run(folder),
        accuracy=accuracy,
        queries=queries,
        evaluations=(evaluation,) if evaluation else (),
    )


def _run(folder: Path) -> Run | None:
    record = read_object(folder / "run.json")
    lines = read_json_lines(folder / "metrics.jsonl")
    if not record and not lines:
        return None
    description = record.get("description")
    return Run(
        description=description if isinstance(description, str) and description.strip() else None,
        parameters=as_count(record.get("parameters")),
        seed=as_count(record.get("seed")),
        sequence_length=as_count(record.get("sequence_length")),
        steps=as_count(record.get("steps")),
        tokens=as_count(record.get("tokens")),
        data=record.get("data"),
        produced_by={key: record[key] for key in PRODUCED_BY if key in record},
        curve=Curve(losses=by_step(lines, "loss"), held_out=by_step(lines, "held_out_bpb")),
    )


def by_step(lines: list[dict[str, Any]], key: str) -> tuple[tuple[int, float], ...]:
    """(step, value) of the lines of a run's metrics that have such a value, by step."""
    # A resumed run repeats the steps after its checkpoint: the later line counts.
    values: dict[int, float] = {}
    for line in lines:
        step, value = as_count(line.get("step")), as_number(line.get(key))
        if step is not None and value is not None:
            values[step] = value
    return tuple(sorted(values.items()))


def _evaluation(folder: Path, task: str) -> Evaluation | None:
    record = read_object(folder / "evaluations" / f"{task}.json")
    if not record:
        return None
    made = as_object(record.get("produced_by"))
    return Evaluation(
        task=task,
        settings=as_object(record.get("settings")),
        produced_by={key: made[key] for key in PRODUCED_BY if key in made},
        results=as_object(record.get("results")),
    )


def _position_loss(results: Any) -> PositionLoss | None:
    if not results:
        return None
    at = {}
    for multiple, record in as_object(results.get("at")).items():
        bucket = _bucket(as_object(record))
        if bucket is not None and str(multiple).isdecimal():
            at[int(multiple)] = bucket
    buckets = [_bucket(record) for record in as_objects(results.get("buckets"))]
    return PositionLoss(
        training_length=as_count(results.get("training_length")),
        documents=as_count(results.get("documents")),
        buckets=tuple(
            sorted((bucket for bucket in buckets if bucket), key=lambda bucket: bucket.start)
        ),
        at=at,
    )


def _bucket(record: dict[str, Any]) -> Bucket | None:
    start, stop = as_count(record.get("start")), as_count(record.get("stop"))
    loss = as_number(record.get("loss"))
    if start is None or stop is None or loss is None:
        return None
    return Bucket(
        start=start, stop=stop, loss=loss, standard_error=as_number(record.get("standard_error"))
    )


def _memory_use(results: Any) -> MemoryUse | None:
    if not results:
        return None
    bytes_at = {}
    for record in as_objects(results.get("contexts")):
        tokens, size = as_count(record.get("tokens")), as_count(record.get("bytes"))
        if tokens is not None and size is not None:
            bytes_at[tokens] = size
    return MemoryUse(
        bytes_at=dict(sorted(bytes_at.items())), table_bytes=as_count(results.get("table_bytes"))
    )


def _decode_speed(results: Any) -> DecodeSpeed | None:
    if not results:
        return None
    return DecodeSpeed(
        context=as_count(results.get("context")),
        tokens_per_second=as_number(results.get("tokens_per_second")),
    )


def _bigram(path: Path) -> Bigram | None:
    results = as_object(read_object(path).get("results"))
    if not results:
        return None
    return Bigram(
        bits_per_byte=as_number(results.get("bpb")),
        training_tokens=as_count(results.get("training_tokens")),
    )


def _samples(path: Path) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            arm=str(record.get("arm", "")),
            prompt=str(record.get("prompt", "")),
            text=str(record.get("text", "")),
            tokens_per_second=as_number(record.get("tokens_per_second")),
            memory_bytes=as_count(record.get("memory_bytes")),
        )
        for record in as_objects(read_json(path))
    )
