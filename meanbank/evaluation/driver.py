"""Running an evaluation: batches, progress, and records that survive an interruption."""

import contextlib
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meanbank.core.config import to_plain
from meanbank.core.files import as_read, locked
from meanbank.core.progress import progress
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, prompt_hash
from meanbank.model.fingerprint import tokenizer_fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an evaluation gave.

    prompt_hash: of the prompts of all records, None without any. subject: what was measured, as
    the evaluation had prepared it.
    """

    results: dict[str, Any]
    scores: dict[str, float]
    records: list[Record]
    prompt_hash: str | None
    subject: Subject = dataclasses.field(repr=False, compare=False)


def run_evaluation(
    evaluation: Evaluation, subject: Subject, log: Path | None = None, identity: str = ""
) -> Outcome:
    """Measure every sample and sum up.

    log: a file of JSON lines, one a record, written as it goes. Records that an earlier evaluation
    left there are used instead of measuring again, if it had the same settings, `inputs`, tokenizer
    and `identity` (whatever tells the subject's weights and data); where times are measured, only
    those of a stopped one. Raises ValueError where another process writes there.
    """
    subject.model.eval()
    subject = evaluation.prepared(subject)
    samples = all_samples(evaluation, subject)
    of = {"settings": to_plain(evaluation), "inputs": evaluation.inputs(), "identity": identity}
    if subject.tokenizer is not None:
        of["tokenizer"] = tokenizer_fingerprint(subject.tokenizer)
    kept = RecordLog(log, of)
    with kept:
        if evaluation.alone and all(sample.id in kept.records for sample in samples):
            kept.restart()
        waiting = [sample for sample in samples if sample.id not in kept.records]
        total = sum(sample.size for sample in samples)
        done = total - sum(sample.size for sample in waiting)
        with progress(evaluation.title, total, done=done) as report:
            for batch in batches(waiting, evaluation.batch):
                records = evaluation.measure(subject, batch)
                for sample, record in zip(batch, records, strict=True):
                    kept.add(sample.id, record)
                report(sum(sample.size for sample in batch))
    records = [kept.records[sample.id] for sample in samples]
    results = evaluation.results(subject, records)
    prompts = [record["prompt"] for record in records if "prompt" in record]
    return Outcome(
        results=results,
        scores=evaluation.scores(results),
        records=records,
        prompt_hash=prompt_hash(" ".join(prompts)) if prompts else None,
        subject=subject,
    )


def all_samples(evaluation: Evaluation, subject: Subject) -> list[Sample]:
    """What will be measured of a prepared subject; ValueError where the evaluation does not fit or
    has one twice."""
    samples = list(evaluation.samples(subject))
    twice = [id for id, count in Counter(each.id for each in samples).items() if count > 1]
    if twice:
        raise ValueError(f"{evaluation.title} would measure {twice[0]} twice: give a setting once")
    return samples


def batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Consecutive samples of one group, at most `size` at a time."""
    batch: list[Sample] = []
    for sample in samples:
        if batch and (len(batch) == size or sample.group != batch[0].group):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def read_records(log: Path) -> Iterator[Record]:
    """The records, with their `id`, that a finished evaluation has left in a file."""
    with log.open(encoding="utf-8") as file:
        if not next(file, None):  # what they are of
            raise ValueError(f"{log} is empty")
        yield from map(json.loads, file)


class RecordLog:
    """Records by sample id, in a file of JSON lines whose first line tells what they are of."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path = path
        self.header = as_read(header)
        self.records: dict[str, Record] = {}
        self._file: Any = None
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "RecordLog":
        if self.path is None:
            return self
        try:
            self._held.enter_context(locked(self.path, wait=False))
        except BlockingIOError:
            raise ValueError(f"another process is writing {self.path}; wait for it") from None
        whole = self._read()
        self._file = self._held.enter_context(self.path.open("r+b"))
        if whole:
            self._file.truncate(whole)  # what a killed process tore
            self._file.seek(0, os.SEEK_END)
        else:
            self.restart()
        return self

    def __exit__(self, *_) -> None:
        self._held.close()

    def restart(self) -> None:
        """Forget all records."""
        self.records.clear()
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
            self._write(self.header)

    def add(self, sample_id: str, record: Record) -> None:
        """Keep a record, on disk too where there is a file."""
        self.records[sample_id] = record
        if self._file is not None:
            self._write({"id": sample_id, **record})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode("utf-8") + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Take the records of an earlier evaluation like this one; returns the bytes they are."""
        assert self.path is not None
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        whole = 0
        for number, line in enumerate(content.splitlines(keepends=True)):
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                value = None
            if not isinstance(value, dict):
                break
            if number == 0 and value != self.header:
                return 0
            if number > 0:
                if not isinstance(value.get("id"), str):
                    break
                self.records[value.pop("id")] = value
            whole += len(line)
        return whole
