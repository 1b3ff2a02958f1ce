"""Folders that are built once: complete and checked, or absent."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_MANIFEST = "manifest.json"
_ATTEMPTS = 5


def cache_root() -> Path:
    """`MEANBANK_CACHE`, or `meanbank` in the user's cache folder (`~/.cache`)."""
    if chosen := os.environ.get("MEANBANK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meanbank"


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Makes sure that `folder` holds what `build` writes.

    `build` gets an empty folder beside the final one, which then takes its place in one rename:
    an interrupted build leaves nothing, and of two builds at once either may win. A folder with a
    missing or changed file is built again.

    Raises ValueError when the folder above is not writable.
    """
    if is_complete(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache {folder.parent} ({error.strerror}): set MEANBANK_CACHE "
            "to a writable folder"
        ) from error
    try:
        build(aside)
        _write_manifest(aside)
        _take_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there, unchanged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest == _digests(folder)
    except (OSError, ValueError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _MANIFEST:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    return digests


def _write_manifest(folder: Path) -> None:
    (folder / _MANIFEST).write_text(json.dumps(_digests(folder), indent=1), encoding="utf-8")


def _take_place(built: Path, folder: Path) -> None:
    for _ in range(_ATTEMPTS):
        try:
            built.rename(folder)
            return
        except OSError:
            if is_complete(folder):
                return
            _remove(folder)
    raise ValueError(f"cannot replace {folder}: remove it by hand")


def _remove(folder: Path) -> None:
    # Renamed first: nobody may see a folder that is half removed.
    grave = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    with contextlib.suppress(OSError):
        folder.rename(grave / "old")
    shutil.rmtree(grave, ignore_errors=True)
