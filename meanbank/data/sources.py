"""Where documents come from: a source is opened by a one-line spec and read in a fixed order."""

import difflib
import glob
import hashlib
import os
import platform
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meanbank.core.errors import one_line
from meanbank.core.files import read_json, write_json
from meanbank.data.cache import cache_root
from meanbank.data.readers import (
    READERS,
    Document,
    checked_text,
    import_extra,
    read_bytes,
    read_text,
)

RECALL = "recall"
SOURCE_CHOICES = ("stdlib", "files:GLOB", "hf:NAME[:SPLIT]", RECALL)
LARGE_FILE = 2**26  # bytes
_ESCAPED = re.compile(r"\[([*?[])\]")  # as `glob.escape` does
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


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

    def bytes(self) -> int | None:
        """Bytes of all text; None where only reading it tells."""
        return None


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


def anchored_spec(spec: str, folder: Path) -> str:
    """The same source, whose files or local folder are named from `folder` on."""
    kind, _, rest = spec.partition(":")
    if kind == "files":
        return f"files:{Path(glob.escape(str(folder))) / os.path.expanduser(rest)}"
    if kind == "hf" and (folder / rest.partition(":")[0]).is_dir():
        return f"hf:{folder / rest}"
    return spec


def open_source(spec: str) -> Source:
    """Opens the source that `spec` names.

    `stdlib`: the running interpreter's own library source, a document a `.py` file.
    `files:GLOB`: files that match (`**` crosses folders); a `.jsonl` file has a document a
    line and a `.parquet` file a document a row, both with the text under `text`; any other
    file is one document of UTF-8 text.
    `hf:NAME[:SPLIT]`: the `text` column of a data set of the Hugging Face hub or of a folder
    that `datasets` can load, read as a stream; SPLIT is `train` unless given.

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
        return ((name, read_bytes(self.root / name)) for name in self._paths)

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

    def bytes(self) -> int | None:
        return self._survey.bytes


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
            read = READERS.get(path.suffix.lower(), read_text)
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

    def bytes(self) -> int | None:
        if any(path.suffix.lower() in READERS for _, path in self._files):
            return None  # text is packed otherwise than it counts
        return sum(path.stat().st_size for _, path in self._files)


class HuggingFaceSource(Source):
    """One split of a data set, a document a row of its `text` column, read as it comes.

    Nothing is downloaded but what is read. A data set that cannot be reached now is known by what
    it was when it was reached last, so that its prepared corpus opens without a network.
    """

    def __init__(self, name: str, split: str):
        self.name, self.split = name, split
        datasets = import_extra("datasets", f"hf:{name}")
        key = hashlib.sha256(f"{name}\0{split}".encode()).hexdigest()
        known = cache_root() / "datasets" / f"{key[:32]}.json"
        try:
            builder = datasets.load_dataset_builder(name)
            self._rows = builder.as_streaming_dataset(split=split)
        # `datasets` raises errors of many unrelated classes: connection, missing, bad split.
        except Exception as error:
            if isinstance(error, ConnectionError) and known.is_file():
                self._rows, self._revision = None, str(read_json(known)["revision"])
                return
            raise ValueError(
                f"cannot load the data set {name!r}, split {split!r}: {one_line(error)}"
            ) from error
        columns = self._rows.column_names  # None where only the first row tells
        if columns is not None:
            self._check_columns(columns)
            self._rows = self._rows.select_columns(["text"])
        # the hub's commit; for local files it changes with their times
        self._revision = str(builder.hash)
        write_json(known, {"name": name, "split": split, "revision": self._revision})

    def _check_columns(self, columns: Iterable[str]) -> None:
        if "text" not in columns:
            raise ValueError(
                f"the data set {self.name!r} has no column 'text', only {', '.join(columns)}"
            )

    def documents(self) -> Iterator[Document]:
        if self._rows is None:
            raise ValueError(f"the data set {self.name!r} cannot be reached to read its text")
        rows, row = iter(self._rows), 0
        while True:
            try:
                record = next(rows)
            except StopIteration:
                return
            except Exception as error:  # a network has as many, and of any class
                raise ValueError(
                    f"the data set {self.name!r} cannot be read after row {row}, what is prepared "
                    f"so far stays: {one_line(error)}"
                ) from error
            self._check_columns(record)
            if record["text"]:
                place = f"the data set {self.name!r}, row {row},"
                yield Document(f"{self.split}:{row}", checked_text(record["text"], place))
            row += 1

    def fingerprint(self) -> str:
        key = f"{self.name}\0{self.split}\0{self._revision}"
        return hashlib.sha256(key.encode("utf-8")).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"source": f"hf:{self.name}:{self.split}", "revision": self._revision}


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard: names below it stay the same when the corpus moves."""
    parts = Path(pattern).parts
    wild = (i for i, part in enumerate(parts) if glob.has_magic(_ESCAPED.sub("", part)))
    fixed = next(wild, len(parts) - 1)
    return _ESCAPED.sub(r"\1", os.path.join(*parts[:fixed])) if fixed else "."


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _name_bytes(name: str) -> bytes:
    # A file name that is not UTF-8 reaches Python as lone surrogates.
    return name.encode("utf-8", "surrogatepass")


def _file_digest(path: Path) -> bytes:
    """sha256 of a file; that of a large one is kept in the cache while size and time stay."""
    try:
        found = path.stat()
        if found.st_size < LARGE_FILE:
            return _read_digest(path)
        stamp = f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
        key = hashlib.sha256(_name_bytes(stamp)).hexdigest()
        memo = cache_root() / "digests" / f"{key[:32]}.json"
        if not memo.is_file():
            write_json(memo, {"file": str(path), "sha256": _read_digest(path).hex()})
        return bytes.fromhex(read_json(memo)["sha256"])
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _read_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _update(digest: Any, *fields: bytes) -> None:
    # Lengths first: without them ("ab", "c") and ("a", "bc") would have one digest.
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
