"""Signals that ask a run to stop."""

import signal
from typing import Any


class Interrupted(Exception):
    """Training stopped by a signal, after a checkpoint."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number = number


class StopSignals:
    """Within it the first SIGINT or SIGTERM is only noted, in `number`; a second acts as usual."""

    def __init__(self) -> None:
        self.number: int | None = None
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
        self.number = number
        self.__exit__()
