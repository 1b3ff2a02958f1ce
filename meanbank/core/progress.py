"""Progress of a long step on stderr: a bar on a terminal, a few plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[..., None]

SECONDS_BETWEEN_LINES = 10.0

_running: list[str] = []  # titles of the steps at hand


@contextmanager
def progress(title: str, total: int | None, *, done: int = 0) -> Iterator[Report]:
    """Yield `report(amount, note="")`, which says that `amount` more of `total` is done.

    total: None where nobody knows it beforehand; then only the notes tell. done: what an earlier
    run had finished; the time left is estimated without it. A step inside another one is silent:
    two bars would write over each other.
    """
    if _running:
        yield lambda amount, note="": None
        return
    _running.append(title)
    try:
        yield from (_bar if sys.stderr.isatty() else _lines)(title, total, done)
    finally:
        _running.remove(title)


@contextmanager
def silence() -> Iterator[None]:
    """Within it no step tells how far it is."""
    _running.append("")
    try:
        yield
    finally:
        _running.remove("")


def _bar(title: str, total: int | None, done: int) -> Iterator[Report]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[note]}"),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")

        def report(amount: int, note: str = "") -> None:
            bar.update(task, advance=amount, note=note)

        yield report


def _lines(title: str, total: int | None, done: int) -> Iterator[Report]:
    started = last_line = time.monotonic()
    first = done

    def report(amount: int, note: str = "") -> None:
        nonlocal last_line, done
        done += amount
        now = time.monotonic()
        if now - last_line < SECONDS_BETWEEN_LINES or (total is not None and done >= total):
            return
        last_line = now
        parts = [note]
        if total is not None:
            rate = (done - first) / (now - started)
            left = f"{(total - done) / rate:.0f} s left" if rate > 0 else ""
            parts = [f"{100 * done // max(total, 1)} %", left, note]
        print(f"{title}: {', '.join(p for p in parts if p)}", file=sys.stderr, flush=True)

    yield report
    print(f"{title}: done in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
