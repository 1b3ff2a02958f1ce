"""Where documents come from: a source is opened by a one-line spec and read in a fixed order."""

import difflib
import glob
import hashlib
import importlib
import json
import os
import platform
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meanbank.core.errors import one_line

RECALL = "recall"
SOURCE_CHOICES = ("stdlib", "files:GLOB", "hf:NAME[:SPLIT]", RECALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One document: `name` is unique within its source and does not depend on where it lies."""

    name: str
    text: str


class Source(ABC):
    """A collection of documents with text. Empty documents are left out."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yields the documents in an order that depends on the content only.

        Raises ValueError (one line) when something cannot be read.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal digest that changes when a document's name or text does."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What to write beside a result: JSON values only."""


def source_choices(spec: str) -> list[str]:
    """The choices for a source, those nearest to `spec` first."""
    name = spec.partition(":")[0].lower()

    def distance(choice: str) -> float:
        return -difflib.SequenceMatcher(a=name, b=choice.partition(":")[0]).ratio()

    return sorted(SOURCE_CHOICES, key=distance)


def check_spec(spec: str) -> None:
    """Raises ValueError unless `spec` has the form of a known source; opens nothing."""
    kind, _, rest = spec.partition(":")
    if spec in ("stdlib", RECALL) or (kind in ("files", "hf") and rest):
        return
    raise ValueError(f"unknown data source {spec!r}: choose from {', '.join(source_choices(spec))}")


def open_source(spec: str) -> Source:
    """Opens the source that `spec` names.

    `stdlib`: the running interpreter's own library source, a document a `.py` file.
    `files:GLOB`: files that match (`**` crosses folders); a `.jsonl` file has a document a
    line and a `.parquet` file a document a row, both with the text under `text`; any other
    file is one document of UTF-8 text.
    `hf:NAME[:SPLIT]`: the `text` column of a data set of the Hugging Face hub or of a folder
    that `datasets` can load; SPLIT is `train` unless given.

    Raises ValueError for an unknown source or one without files, and ImportError when the source
    needs a package that is not installed.
    """
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "stdlib":
        return StdlibSource()
    if kind == "files":
        return FilesSource(rest)
    if kind == "hf":
        name, _, split = rest.partition(":")
        return HuggingFaceSource(name, split or "train")
    raise ValueError("the source 'recall' makes its own sequences and has no documents to open")


@dataclass(frozen=True, kw_only=True)
class _Survey:
    files: int
    bytes: int
    skipped: int
    digest: str


class StdlibSource(Source):
    """Every `.py` file under the interpreter's library folder that is UTF-8 text.

    Installed packages and caches are left out. Files in another encoding (a few of CPython's own
    tests) are skipped and counted in `describe()`. `root` replaces the library folder.
    """

    def __init__(self, root: Path | None = None):
        self.root = Path(sysconfig.get_path("stdlib")) if root is None else root
        self._paths = self._list()
        if not self._paths:
            raise ValueError(
                f"no Python source under {self.root}: use a Python that ships its library as .py "
                "files, or name other text with files:GLOB"
            )

    def _list(self) -> list[str]:
        paths = []
        for folder, subfolders, files in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
            here = Path(folder).relative_to(self.root)
            paths += [(here / name).as_posix() for name in files if name.endswith(".py")]
        return sorted(paths)

    def documents(self) -> Iterator[Document]:
        for name, data in self._contents():
            text = _decoded(data)
            if text:
                yield Document(name, text)

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        return ((name, _read_bytes(self.root / name)) for name in self._paths)

    @cached_property
    def _survey(self) -> _Survey:
        digest = hashlib.sha256()
        files = size = skipped = 0
        for name, data in self._contents():
            if _decoded(data) is None:
                skipped += 1
            elif data:
                _update(digest, _name_bytes(name), data)
                files += 1
                size += len(data)
        return _Survey(files=files, bytes=size, skipped=skipped, digest=digest.hexdigest())

    def fingerprint(self) -> str:
        return self._survey.digest

    def describe(self) -> dict[str, Any]:
        return {
            "source": "stdlib",
            "python": platform.python_version(),
            "files": self._survey.files,
            "bytes": self._survey.bytes,
            "skipped_files": self._survey.skipped,
        }


class FilesSource(Source):
    """The files that match a glob, sorted by their path below the glob's fixed part."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            raise ValueError(
                f"{pattern!r} is a folder: name its files, for example "
                f"files:{pattern.rstrip('/')}/**/*.txt"
            )
        root = _fixed_folder(expanded)
        matches = {path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path)}
        if not matches:
            raise ValueError(
                f"no file matches {pattern!r} (looked from {os.getcwd()}): "
                "check the path and the glob"
            )
        named = [(Path(os.path.relpath(path, root)).as_posix(), Path(path)) for path in matches]
        self._files = sorted(named)

    def documents(self) -> Iterator[Document]:
        for name, path in self._files:
            read = _READERS.get(path.suffix.lower(), _read_text)
            for document in read(name, path):
                if document.text:
                    yield document

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, path in self._files:
            _update(digest, _name_bytes(name), _file_digest(path))
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {
            "source": f"files:{self.pattern}",
            "files": len(self._files),
            "bytes": sum(path.stat().st_size for _, path in self._files),
        }


class HuggingFaceSource(Source):
    """One split of a data set, a document a row of its `text` column."""

    def __init__(self, name: str, split: str):
        self.name, self.split = name, split
        datasets = _import_extra("datasets", f"hf:{name}")
        try:
            self._rows = datasets.load_dataset(name, split=split)
        # `datasets` raises errors of many unrelated classes: connection, missing, bad split.
        except Exception as error:
            raise ValueError(
                f"cannot load the data set {name!r}, split {split!r}: {one_line(error)}"
            ) from error
        if "text" not in self._rows.column_names:
            columns = ", ".join(self._rows.column_names)
            raise ValueError(f"the data set {name!r} has no column 'text', only {columns}")

    def documents(self) -> Iterator[Document]:
        for row, record in enumerate(self._rows.select_columns(["text"])):
            if record["text"]:
                yield Document(f"{self.split}:{row}", record["text"])

    def fingerprint(self) -> str:
        # `datasets` keys its own cache by this value; hashing gigabytes of rows again buys nothing.
        key = f"{self.name}\0{self.split}\0{self._rows._fingerprint}"
        return hashlib.sha256(key.encode("utf-8")).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"source": f"hf:{self.name}:{self.split}", "rows": len(self._rows)}


def _read_text(name: str, path: Path) -> Iterator[Document]:
    try:
        yield Document(name, _read_bytes(path).decode("utf-8"))
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


def _read_parquet(name: str, path: Path) -> Iterator[Document]:
    pyarrow = _import_extra("pyarrow", str(path))
    parquet = _import_extra("pyarrow.parquet", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if "text" not in columns:
                raise ValueError(f"{path} has no column 'text', only {', '.join(columns)}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield Document(f"{name}:{row}", str(text))
                    row += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read {path} as parquet: {one_line(error)}") from error


_READERS: dict[str, Callable[[str, Path], Iterator[Document]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard: names below it stay the same when the corpus moves."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return os.path.join(*parts[:fixed]) if fixed else "."


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _name_bytes(name: str) -> bytes:
    # A file name that is not UTF-8 reaches Python as lone surrogates.
    return name.encode("utf-8", "surrogatepass")


def _file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _update(digest: Any, *fields: bytes) -> None:
    # Lengths first: without them ("ab", "c") and ("a", "bc") would have one digest.
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)


def _import_extra(module: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{wanted_by} needs {module.partition('.')[0]}: pip install 'meanbank[data]'"
        ) from error
