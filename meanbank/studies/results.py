"""`results.jsonl` of a study: one line for each job that is finished."""

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from meanbank.core.files import locked, write_text

RESULTS, LOCK = "results.jsonl", ".results.lock"

Result = dict[str, Any]


def read_results(out: Path) -> list[Result]:
    """The results in the order in which jobs were finished; one that a crash tore is left out."""
    return list(_read(out / RESULTS)[0].values())


def keep_result(out: Path, result: Result) -> None:
    """Add a job's result, in place of an earlier one; safe among processes that do it at a time."""
    with locked(out / LOCK):
        found, torn = _read(out / RESULTS)
        key, line = _key(result), _line(result)
        if key not in found and not torn:
            with (out / RESULTS).open("ab", buffering=0) as file:
                file.write(line)
        elif torn or _line(found[key]) != line:
            found[key] = result
            _write(out, found.values())


def drop_results(out: Path, dropped: Callable[[Result], bool]) -> None:
    """Remove the results that `dropped` says."""
    with locked(out / LOCK):
        found, torn = _read(out / RESULTS)
        kept = [result for result in found.values() if not dropped(result)]
        if torn or len(kept) < len(found):
            _write(out, kept)


def _key(result: Result) -> tuple[str, int]:
    return result["arm"], result["seed"]


def _line(result: Result) -> bytes:
    return json.dumps(result, allow_nan=False).encode("utf-8") + b"\n"


def _write(out: Path, results: Iterable[Result]) -> None:
    write_text(out / RESULTS, "".join(_line(result).decode("utf-8") for result in results))


def _read(path: Path) -> tuple[dict[tuple[str, int], Result], bool]:
    """Results by job, the last of each, and whether anything else stands in the file."""
    found: dict[tuple[str, int], Result] = {}
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return found, False
    lines = content.splitlines(keepends=True)
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # torn, or nobody's
            result = json.loads(line if line.endswith(b"\n") else b"")
            if _line(result):  # can be written again: no infinity, no NaN
                found[_key(result)] = result
    return found, len(found) < len(lines)
