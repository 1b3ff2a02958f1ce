"""Reading result files that may be missing or torn, and writing files that are never half there."""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The file's value, None where there is no such file; ValueError where it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); run its command again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file, empty where there is no such file or no object in it."""
    return as_object(read_json(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file with one a line; lines that a killed run tore are left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def as_object(value: Any) -> dict[str, Any]:
    """The value where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """The JSON objects of a list, empty where the value is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """The value where it is a number; not-a-number stays, for it is a result."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def as_count(value: Any) -> int | None:
    """The value as a whole number, where it is a finite number."""
    number = as_number(value)
    return int(number) if number is not None and math.isfinite(number) else None


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comma-separated values, a column for each name in order of first appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_lines(names, ([row.get(name, "") for name in names] for row in rows))


def csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Comma-separated values with a line of names."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(columns)
    out.writerows(rows)
    return text.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Write aside and rename, so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
