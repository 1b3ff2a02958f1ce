"""Files as documents: plain text, JSON lines and Parquet."""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meanbank.core.errors import one_line

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One document: `name` is unique within its source and does not depend on where it lies."""

    name: str
    text: str


def read_text(name: str, path: Path) -> Iterator[Document]:
    """The whole file, which must be UTF-8, as one document."""
    try:
        yield Document(name, read_bytes(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it or narrow the glob"
        ) from error


def _read_jsonl(name: str, path: Path) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Document(f"{name}:{number}", _text_of_line(line, path, number))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: convert it or narrow the glob") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _text_of_line(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is not JSON: {one_line(error)}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{path}, line {number} has no string under 'text'")
    if _SURROGATE.search(text):
        raise ValueError(
            f"{path}, line {number} has half a surrogate pair: that is not Unicode text"
        )
    return text


def checked_text(value: Any, where: str) -> str:
    """A text field, whose bytes may be UTF-8; ValueError for anything else."""
    try:
        text = value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (byte {error.start})") from None
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text under 'text', but {type(text).__name__}")
    return text


def _read_parquet(name: str, path: Path) -> Iterator[Document]:
    pyarrow = import_extra("pyarrow", str(path))
    parquet = import_extra("pyarrow.parquet", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise ValueError(f"{path} has no column 'text', only {', '.join(columns)}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield Document(f"{name}:{row}", checked_text(text, f"{path}, row {row}"))
                    row += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read {path} as parquet: {one_line(error)}") from error


READERS: dict[str, Callable[[str, Path], Iterator[Document]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def read_bytes(path: Path) -> bytes:
    """Raises ValueError, in one line, when the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def import_extra(module: str, wanted_by: str) -> Any:
    """A module of the extra `data`; ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{wanted_by} needs {module.partition('.')[0]}: pip install 'meanbank[data]'"
        ) from error
