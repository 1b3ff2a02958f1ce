"""How answers are scored, and tables of scores."""

import re
import statistics
from collections.abc import Sequence
from typing import Any

from meanbank.evaluation.base import Record, standard_error

_CONTROL = re.compile(r"[\x00-\x1f]")


def share_found(answer: str, references: Sequence[str]) -> float:
    """RULER's `string_match_all`: the share of references in the answer, whatever their case."""
    return sum(_found(answer, references)) / len(references)


def any_found(answer: str, references: Sequence[str]) -> float:
    """RULER's `string_match_part`: 1 where any of the references is in the answer, else 0."""
    return float(any(_found(answer, references)))


def _found(answer: str, references: Sequence[str]) -> list[bool]:
    cleaned = _CONTROL.sub("\n", answer.strip()).strip().lower()
    return [reference.lower() in cleaned for reference in references]


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each task and length, in order of appearance.

    tokens: of a prompt, on average. standard_error: of the mean, None for a single sample.
    """
    return [
        {
            "task": task,
            "length": length,
            "score": statistics.fmean(values),
            "samples": len(values),
            "standard_error": standard_error(values),
            "tokens": statistics.fmean(record["tokens"] for record in group),
        }
        for (task, length), group in grouped(records, "task", "length").items()
        if (values := [value_of(record) for record in group])
    ]


def averages(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean over tasks at each length."""
    return [
        {
            "length": length,
            "score": statistics.fmean(row["score"] for row in group),
            "tasks": len(group),
        }
        for (length,), group in grouped(table, "length").items()
    ]


def by_depth(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each task, length and depth of a needle: what a heat map is made of."""
    placed = [record for record in records if record["depth"] is not None]
    return [
        {
            "task": task,
            "length": length,
            "depth": depth,
            "score": statistics.fmean(map(value_of, group)),
            "samples": len(group),
        }
        for (task, length, depth), group in sorted(
            grouped(placed, "task", "length", "depth").items()
        )
    ]


def value_of(record: Record) -> float:
    """The one score of a record."""
    (value,) = record["scores"].values()
    return value


def grouped(items: Sequence[dict[str, Any]], *names: str) -> dict[tuple, list[dict[str, Any]]]:
    """Items by their values of `names`, in order of appearance."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for item in items:
        groups.setdefault(tuple(item[name] for name in names), []).append(item)
    return groups
