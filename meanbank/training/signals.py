"""Signals that ask a run to stop."""

import signal
import time
from typing import Any

PATIENCE = 30.0  # seconds, after which torchrun kills processes that it has asked to stop


class Interrupted(Exception):
    """Training stopped by a signal, after a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number = number


class StopSignals:
    """Within it the first SIGINT or SIGTERM is only noted, in `number`; a second acts as usual.

    patience: seconds in which further signals say no more than the first: torchrun hands its own on
    to processes that may have had them already.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.number: int | None = None
        self._patience, self._first = patience, 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread: signals are somebody else's
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.number is None:
            self.number, self._first = number, time.monotonic()
            if not self._patience:
                self.__exit__()
        elif time.monotonic() > self._first + self._patience:
            self.__exit__()
            signal.raise_signal(number)
