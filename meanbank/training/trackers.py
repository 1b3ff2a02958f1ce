"""Where a run's figures go besides `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio."""

import contextlib
import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from meanbank.core.errors import one_line
from meanbank.core.files import read_object, write_json

PROJECT = "meanbank"
WANDB_ID = "wandb.json"  # beside the folder wandb/, which is wandb's own


class Tracker(Protocol):
    """Somebody who is told a run's figures."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take figures of a step (counted from 1); there may be more of the same step."""

    def close(self) -> None:
        """Have everything where it belongs."""


class TensorBoard:
    """Event files in RUN/tensorboard; what an earlier try wrote after `first_step` is purged."""

    def __init__(self, run: Path, first_step: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run / "tensorboard"
        new = not folder.exists()
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)
        if new:
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            self._writer.add_text("config", f"```yaml\n{text}```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run with files in RUN/wandb, which `wandb sync` sends; its id is in RUN/wandb.json.

    Offline unless the environment has WANDB_MODE; WANDB_PROJECT and the like hold as ever. Steps
    that are done again after a kill have the same figures, and wandb keeps the first.
    """

    def __init__(self, run: Path, first_step: int, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":  # or wandb would report its own errors
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        kept = run / WANDB_ID
        if not kept.is_file():
            write_json(kept, {"id": uuid.uuid4().hex[:8]})
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.resolve().name,
            id=str(read_object(kept).get("id")),
            resume=None if mode == "offline" else "allow",  # offline ones have the same id
            dir=str(run),
            mode=mode,  # pyright: ignore[reportArgumentType]
            config=dict(config),
            settings=wandb.Settings(console="off", quiet=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A Trackio run in RUN/trackio: `TRACKIO_DIR=RUN/trackio trackio show` is its dashboard.

    The environment may say TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. Figures of the
    machine are not logged.
    """

    def __init__(self, run: Path, first_step: int, config: Mapping[str, Any]) -> None:
        folder = Path(os.environ.get("TRACKIO_DIR", run / "trackio")).resolve()
        with _environment("TRACKIO_DIR", str(folder)):  # is read once, when it is imported
            import trackio
            from trackio.utils import TRACKIO_DIR
        if folder != Path(TRACKIO_DIR).resolve():
            raise RuntimeError(
                f"trackio writes to {TRACKIO_DIR} until this process ends; set TRACKIO_DIR for "
                "several runs in one"
            )
        self._trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=PROJECT,
                name=run.resolve().name,
                resume="allow",
                config=dict(config),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


# By the name in `training.trackers`, which is that of the package and of the extra, too.
TRACKERS: dict[str, Callable[[Path, int, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Trackers:
    """Several trackers, of which none can end a run: one that fails is left out with a warning."""

    def __init__(self) -> None:
        self._used: dict[str, Tracker] = {}

    def add(self, name: str, make: Callable[[], Tracker]) -> None:
        """Begin with one more."""
        with self._warned(name):
            self._used[name] = make()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Tell all of them the numbers among the values."""
        numbers = {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name, tracker in list(self._used.items()):
            with self._warned(name):
                tracker.log(step, numbers)

    def close(self) -> None:
        """Close all of them."""
        for name, tracker in list(self._used.items()):
            with self._warned(name):
                tracker.close()
        self._used.clear()

    @contextlib.contextmanager
    def _warned(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of libraries and of services
            self._used.pop(name, None)
            print(
                f"warning: tracker {name} fails and is left out: {one_line(error)}; "
                "metrics.jsonl has everything",
                file=sys.stderr,
            )


def check_trackers(names: Iterable[str]) -> None:
    """Raise ImportError, in one line, for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ImportError(
                f"training.trackers: {name} is not installed: pip install 'meanbank[{name}]'"
            )


@contextlib.contextmanager
def tracking(
    names: Iterable[str], run: Path, first_step: int, config: Mapping[str, Any]
) -> Iterator[Trackers]:
    """The trackers of those names of a run that goes on after `first_step`, closed at the end.

    run: its folder, whose name is the run's and which keeps what resuming needs; config: the plain
    configuration, of which a tracker keeps one.
    """
    trackers = Trackers()
    try:
        for name in names:
            trackers.add(name, lambda name=name: TRACKERS[name](run, first_step, config))
        yield trackers
    finally:
        trackers.close()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
