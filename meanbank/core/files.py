"""Files that are whole or not there."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(path: Path, *, overwrite: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file to write to that becomes `path` only when the block has ended without an error.

    Written aside, flushed to disk, renamed: a crash leaves the old file or the new one. Without
    `overwrite`, FileExistsError when there is something at `path` by then, which stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(path)
    try:
        with told(path):
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if overwrite:
                aside.replace(path)
            else:
                _rename_to_new(aside, path)
            flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Have an error of the disk, such as that it is full, tell the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def aside_of(path: Path) -> Path:
    """Where this process writes what is to become `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_asides(folder: Path) -> None:
    """Remove what processes that are no more were writing in a folder; nobody may write there."""
    for left in folder.glob(".*.tmp"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """`remove`, at once for whoever looks: a crash leaves all of it, or what is no more in use."""
    gone = path.with_name(f".{path.name}.{os.getpid()}.gone.tmp")
    path.replace(gone)
    remove(gone)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_to_new(aside: Path, path: Path) -> None:
    """Rename where nothing stands; a hard link cannot replace, where the file system has them."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(f"{path} exists already") from None
        aside.replace(path)


def write_text(path: Path, text: str) -> None:
    """The text as a `whole_file` in UTF-8."""
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `json_text`."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Indented JSON; NaN and infinities are refused."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Raises ValueError, in one line, when the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not valid JSON") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; ValueError, in one line, where there is none in it."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def as_read(value: Any) -> Any:
    """The value as it comes back from JSON: tuples are lists, names of numbers texts."""
    return json.loads(json.dumps(value))


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock that the file `path` stands for; it ends with the process, however that ends.

    Without `wait`, BlockingIOError where somebody else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
