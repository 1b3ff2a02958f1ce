"""One process has a run at a time, and what became of it is written down.

RUN/lock          locked while a process writes the run; who that is
RUN/status.json   running, done, stopped or failed, and why
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from meanbank.core.errors import one_line
from meanbank.core.files import read_json, remove_asides, told, write_json
from meanbank.training.checkpoint import FOLDER
from meanbank.training.signals import Interrupted

LOCK, STATUS = "lock", "status.json"
State = Literal["running", "done", "stopped", "failed"]

# Whoever only asks has the lock for a moment, too.
_TRIES, _SECONDS_BETWEEN = 5, 0.05
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # of a file system


@contextlib.contextmanager
def claimed(run: Path) -> Iterator[None]:
    """Have a run's folder, which is made where it is missing, and free it of files left aside.

    The lock goes with the process, however it ends. Raises ValueError where another one has it.
    """
    run.mkdir(parents=True, exist_ok=True)
    with (run / LOCK).open("a+", encoding="utf-8") as file:
        for left in reversed(range(_TRIES)):
            if _lock(file.fileno(), fcntl.LOCK_EX):
                break
            if not left:
                raise ValueError(_in_use(run))
            time.sleep(_SECONDS_BETWEEN)
        with told(run / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        for folder in (run, run / FOLDER):
            remove_asides(folder)
        yield


def check_unclaimed(run: Path) -> None:
    """Raise ValueError when a process has the run now."""
    if is_claimed(run):
        raise ValueError(_in_use(run))


def is_claimed(run: Path) -> bool:
    """Whether a process has the run now."""
    try:
        with (run / LOCK).open("rb") as file:
            return not _lock(file.fileno(), fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _in_use(run: Path) -> str:
    who = (run / LOCK).read_text(encoding="utf-8") or "another process"
    return f"{run} is in use by {who}: wait for it, stop it, or give another --out"


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextlib.contextmanager
def recorded(run: Path) -> Iterator[None]:
    """Write down that a claimed run is running, and how that ended."""
    write_json(run / STATUS, {"state": "running", "reason": None})
    try:
        yield
    except Interrupted as stop:
        _write_end(run, "stopped", one_line(stop))
        raise
    except BaseException as error:
        _write_end(run, "failed", one_line(error))
        raise
    _write_end(run, "done", None)


def _write_end(run: Path, state: State, reason: str | None) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock that is free tells enough
        write_json(run / STATUS, {"state": state, "reason": reason})


def status_of(run: Path) -> tuple[State | None, str | None]:
    """What became of a run and why; None for runs of versions that did not write it down."""
    if not (run / STATUS).is_file():
        return ("running", None) if is_claimed(run) else (None, None)
    saved: Any = read_json(run / STATUS)
    state = saved.get("state") if isinstance(saved, dict) else None
    if is_claimed(run):
        return "running", None
    if state == "running":
        return "failed", "its process was killed"
    if state not in ("done", "stopped", "failed"):
        raise ValueError(f"{run / STATUS} is not the status of a run")
    return cast(State, state), saved.get("reason")
