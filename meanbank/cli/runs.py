"""`meanbank runs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from meanbank.training.overview import RunState

SHOW = "show"
COLUMNS = ["run", "state", "step", "of", "tokens", "loss", "tokens/s", "left"]


def runs(
    folder: Annotated[str, tyro.conf.Positional] = "runs",
    run: Annotated[Path | None, tyro.conf.Positional] = None,
    /,
    out: Path | None = None,
) -> int:
    """List runs, or show one: meanbank runs [FOLDER], meanbank runs show RUN.

    A list tells the state of each run (running, done, stopped or failed), its steps and tokens, its
    last loss and, while it is running, the time that is left. For one run, its curves are shown:
    loss, held-out bits per byte, learning rate and gradient norm, and where the time of its steps
    went. The page has loss by position and memory statistics besides, where they were logged.

    Args:
        folder: a folder that holds runs, at any depth; or the word show.
        run: after show, the folder of a run.
        out: after show, also write a page with all figures of the run as this HTML file, or as
            report.html in this folder; a name that ends in .png has the curves alone.
    """
    if folder == SHOW:
        if run is None:
            raise ValueError("which run? meanbank runs show RUN")
        return show(run, out)
    if run is not None or out is not None:
        raise ValueError(f"{run or out}: only `meanbank runs show RUN` takes more than a folder")
    return list_runs(Path(folder))


def list_runs(folder: Path) -> int:
    """A table of the runs below a folder, and why those that failed did."""
    from rich.console import Console

    from meanbank.cli.tables import table
    from meanbank.training.overview import find_runs, state_of

    states = [state_of(run) for run in find_runs(folder)]
    if not states:
        raise ValueError(f"{folder} holds no runs; `meanbank train CONFIG` makes one")
    rows = [_cells(state, folder) for state in states]
    Console().print(table(f"Runs in {folder}", COLUMNS, rows))
    for state in states:
        if state.reason is not None:
            print(f"{state.path}: {state.reason}")
    return 0


def show(run: Path, out: Path | None) -> int:
    """The curves of a run, and where the time of its steps went."""
    from meanbank.reports.console import print_table
    from meanbank.reports.curves import curve_table, draw_curves
    from meanbank.reports.pace import pace_table
    from meanbank.reports.run import write_run_report
    from meanbank.training.overview import state_of
    from meanbank.training.run import read_config

    file = None if out is None else _file(out)
    read_config(run)  # raises where it is no run
    state = state_of(run)
    print_table(curve_table(run))
    pace = pace_table(run)
    if pace is not None:
        print_table(pace)
    print(f"{state.state}, step {state.step:,} of {state.steps or 0:,}")
    if state.reason is not None:
        print(state.reason)
    if file is not None and file.suffix == ".png":
        draw_curves(run, file)
        print(f"figure: {file}")
    elif file is not None:
        write_run_report(run, file, state=state.state, reason=state.reason)
        print(f"report: {file}")
    return 0


def _file(out: Path) -> Path:
    """The file that is written; ValueError for one that is neither a page nor a picture."""
    if out.is_dir() or not out.suffix:
        return out / "report.html"
    if out.suffix not in (".html", ".png"):
        raise ValueError(f"--out {out} must end in .html or .png, or name a folder")
    return out


def _cells(state: RunState, folder: Path) -> tuple:
    name = str(state.path.relative_to(folder)) if state.path != folder else state.path.name
    figures = (state.step, state.steps, state.tokens, state.loss, state.tokens_per_second)
    return (name, state.state, *figures, _duration(state.seconds_left))


def _duration(seconds: float | None) -> str | None:
    """`3725.2` -> `1:02:05`."""
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
