"""Folders that are built once: complete and checked, or absent."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from meanbank.core.files import read_json, write_json

_MANIFEST = "manifest.json"


def cache_root() -> Path:
    """`MEANBANK_CACHE`, or `meanbank` in the user's cache folder (`~/.cache`)."""
    if chosen := os.environ.get("MEANBANK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meanbank"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Makes sure that `folder` holds what `build` writes.

    `build` gets a folder beside the final one, which then takes its place in one rename. It holds
    what an interrupted build has left there, for `build` to go on from. Of two builds at once the
    second waits, and finds the folder. A folder with a missing or changed file is built again.

    Raises ValueError when the folder above is not writable.
    """
    if is_complete(folder):
        return
    aside = folder.with_name(f".{folder.name}.partial")
    with _alone(folder):
        if is_complete(folder):  # somebody else has built it meanwhile
            return
        aside.mkdir(exist_ok=True)
        try:
            build(aside)
        except BaseException:
            with contextlib.suppress(OSError):  # something is left to go on from
                aside.rmdir()
            raise
        write_json(aside / _MANIFEST, {name: _entry(aside / name) for name in _names(aside)})
        _remove(folder)
        aside.rename(folder)


def is_complete(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there, unchanged.

    Only files newer than the manifest are read: a set of gigabytes opens at once.
    """
    try:
        manifest = read_json(folder / _MANIFEST)
        written = (folder / _MANIFEST).stat().st_mtime_ns
        return sorted(manifest) == _names(folder) and all(
            _is_as_told(folder / name, entry, written) for name, entry in manifest.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_as_told(path: Path, entry: dict, written: int) -> bool:
    found = path.stat()
    if found.st_size != entry["bytes"]:
        return False
    return found.st_mtime_ns <= written or _entry(path) == entry


def _entry(path: Path) -> dict:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(p.relative_to(folder).as_posix() for p in paths if p.name != _MANIFEST)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process or thread builds `folder`; a killed one's lock is no lock."""
    import fcntl

    lock = folder.with_name(f".{folder.name}.lock")
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        except OSError as error:
            raise ValueError(
                f"cannot write to the cache {folder.parent} ({error.strerror}): set "
                "MEANBANK_CACHE to a writable folder"
            ) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:  # who held it before has removed it
                ours = os.path.samestat(os.fstat(file.fileno()), lock.stat())
            except FileNotFoundError:
                ours = False
            if ours:
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return


def _remove(folder: Path) -> None:
    # Renamed first: nobody may see a folder that is half removed.
    grave = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(grave, ignore_errors=True)
    if folder.exists():
        folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
