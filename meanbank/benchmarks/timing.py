"""Times of several arms that take turns: A B A B, so that a slow minute slows all of them."""

import contextlib
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meanbank.benchmarks.settings import Machine

LEAST_ROUNDS = 3
LEAST_SECONDS = 0.05  # a shorter run is repeated within its turn, for the sake of the clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """Something to time.

    prepare: called before each run, untimed; run: gets what that returned; steps: how many equal
    pieces of work a run does, whose mean is wanted.
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a step in each round: CPU time of the process, and wall time."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]

    @property
    def cpu_seconds(self) -> float:
        """The median round's CPU time."""
        return statistics.median(self.cpu)

    @property
    def wall_seconds(self) -> float:
        """The median round's wall time."""
        return statistics.median(self.wall)

    def seconds(self, clock: str) -> float:
        """The median round's time by that clock, "cpu" or "wall"."""
        return self.cpu_seconds if clock == "cpu" else self.wall_seconds

    def spread(self, clock: str) -> float:
        """Distance of the quartiles over the median: how far rounds differ."""
        times = self.cpu if clock == "cpu" else self.wall
        if len(times) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return (high - low) / middle if middle else 0.0


def alternate(
    arms: Mapping[Any, Arm],
    machine: Machine,
    *,
    rounds: int,
    seconds: float,
    least_seconds: float = LEAST_SECONDS,
    warm_up: bool = True,
) -> dict[Any, Timing]:
    """Time the arms in turns, after one untimed run of each.

    rounds: at most that many; seconds: no further round is begun after so long, from the third on;
    warm_up: False where each arm's `prepare` takes a step of its own and a run has many. Garbage
    is collected before each run and never within one.
    """
    cpu: dict[Any, list[float]] = {name: [] for name in arms}
    wall: dict[Any, list[float]] = {name: [] for name in arms}
    loops = dict.fromkeys(arms, 1)
    with _no_collector():
        for name, arm in arms.items():
            if not warm_up and arm.steps > 1:
                continue
            _, took = _timed(arm, machine)
            loops[name] = max(1, min(1000, math.ceil(least_seconds / max(took, 1e-6))))
        began = time.perf_counter()
        for number in range(rounds):
            late = time.perf_counter() - began > seconds
            if late and number >= min(LEAST_ROUNDS, rounds):
                break
            for name, arm in arms.items():
                gc.collect()
                turns = [_timed(arm, machine) for _ in range(loops[name])]
                scale = loops[name] * arm.steps
                cpu[name].append(sum(used for used, _ in turns) / scale)
                wall[name].append(sum(took for _, took in turns) / scale)
    return {name: Timing(tuple(cpu[name]), tuple(wall[name])) for name in arms}


def _timed(arm: Arm, machine: Machine) -> tuple[float, float]:
    """(CPU, wall) seconds of one run; what it returns is freed after the clocks have stopped."""
    prepared = arm.prepare()
    machine.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    result = arm.run(prepared)
    machine.synchronize()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    del result, prepared
    return cpu, wall


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
