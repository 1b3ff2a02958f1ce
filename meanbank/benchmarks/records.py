"""Results as plain JSON objects, one for each arm of a cell, written as they are measured."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from meanbank.benchmarks.ceilings import Ceilings
from meanbank.benchmarks.limits import Work
from meanbank.benchmarks.settings import Machine, Sizes
from meanbank.benchmarks.timing import Timing

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a cell is measured.

    rounds: of all arms, at most; seconds: after which no further round begins, from the third on.
    """

    rounds: int = 7
    seconds: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                value = getattr(self, field.name)
                raise ValueError(f"{field.name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One arm of a cell. arm, budget: its name; extra: further fields of its record."""

    arm: str
    budget: str | None
    timing: Timing
    work: Work
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def records_of(
    common: Mapping[str, Any],
    measured: Iterable[Measured],
    ceilings: Ceilings,
    machine: Machine,
    baselines: Iterable[str] = ("sdpa", "full"),
) -> list[Record]:
    """The records of a cell.

    seconds are medians over the rounds, by the machine's clock; ratio_to_X: how many times faster
    than arm X (above 1 is faster), None where that did not run; share_of_limit: the least time
    that the measured ceilings allow for the arm's work, over its time.
    """
    measured, clock = list(measured), machine.clock
    seconds = {(one.arm, one.budget): one.timing.seconds(clock) for one in measured}
    records = []
    for one in measured:
        own = seconds[one.arm, one.budget]
        limit, limited_by = ceilings.seconds(one.work.flops, one.work.nbytes)
        ratios = {}
        for name in baselines:
            base = seconds.get((name, one.budget), seconds.get((name, None)))
            ratios[f"ratio_to_{name}"] = base / own if base is not None else None
        record = {
            **common,
            "budget": one.budget,
            "arm": one.arm,
            "cpu_seconds": one.timing.cpu_seconds,
            "wall_seconds": one.timing.wall_seconds,
            "seconds": own,
            "clock": clock,
            "spread": one.timing.spread(clock),
            "rounds": len(one.timing.cpu),
            **ratios,
            "share_of_limit": limit / own,
            "limited_by": limited_by,
            "flops": one.work.flops,
            "bytes": one.work.nbytes,
            "ceiling_flops_per_second": ceilings.flops_per_second,
            "ceiling_bytes_per_second": ceilings.bytes_per_second,
            **one.extra,
            "produced_by": machine.provenance(common["dtype"]),
        }
        records.append(record)
    return records


def sizes_of(sizes: Sizes) -> Record:
    """Sizes as fields of a record."""
    return dataclasses.asdict(sizes)


@contextmanager
def json_lines(path: Path | None) -> Iterator[IO[str] | None]:
    """A new file for `write`; ValueError where something stands there; None without a path."""
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise ValueError(f"{path} exists already; give another name or remove it") from None
    with file:
        yield file


def write(file: IO[str] | None, record: Record) -> None:
    """Append a line, at once: an interrupted benchmark keeps what it has measured."""
    if file is not None:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
