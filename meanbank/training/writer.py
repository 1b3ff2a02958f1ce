"""A thread that writes checkpoints while training goes on."""

import threading
from pathlib import Path
from types import TracebackType

from meanbank.core.errors import one_line
from meanbank.training.checkpoint import Snapshot, checkpoints, save_checkpoint, step_of


class CheckpointError(ValueError):
    """A checkpoint could not be written; the message is one line, and those before are there."""


class CheckpointWriter:
    """Writes snapshots of a run, one at a time, aside of the thread that trains.

    What goes wrong is raised by the next `check`, `save` or `wait`. As a context manager it waits
    at the end for what is being written.
    """

    def __init__(self, run: Path, *, keep_last: int, keep_every: int) -> None:
        self._run = run
        self._keep_last, self._keep_every = keep_last, keep_every
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, taken: Snapshot) -> None:
        """Begin to write a snapshot, once the one before is written."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=[taken], name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong until now; CheckpointError where the disk refused."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the last snapshot is written, and `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, taken: Snapshot) -> None:
        try:
            save_checkpoint(
                self._run, taken, keep_last=self._keep_last, keep_every=self._keep_every
            )
        except (OSError, ValueError) as error:
            self._error = CheckpointError(self._told(taken.step, error))
        except Exception as error:  # raised again where somebody sees it
            self._error = error

    def _told(self, step: int, error: Exception) -> str:
        reason = error.strerror if isinstance(error, OSError) else None
        left = [str(step_of(path)) for path in checkpoints(self._run) if step_of(path) < step]
        good = f"the checkpoint of step {left[-1]} is there" if left else "there is none before it"
        return f"cannot save step {step} of {self._run}: {reason or one_line(error)}; {good}"

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:  # else that one is the reason to tell
                raise
