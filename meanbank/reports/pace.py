"""Where the time of a run's steps went, as a table."""

import statistics
from pathlib import Path
from typing import Any

from meanbank.reports.files import as_number, read_json_lines
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import percent, rate

PART = "_seconds"  # the end of the names of a step's parts
SPEED, UTILIZATION = "tokens_per_second", "utilization"


def pace_table(run: Path | str) -> Table | None:
    """Medians over the steps of a run: speed, utilisation, each part's share of a step's time.

    Parts are whatever figures of a step end in `_seconds`, which are its whole time. None where no
    step tells its parts.
    """
    steps = [line for line in read_json_lines(Path(run) / "metrics.jsonl") if SPEED in line]
    names = list(dict.fromkeys(name for line in steps for name in line if name.endswith(PART)))
    shares = [share for line in steps if (share := _shares(line, names))]
    if not shares:
        return None
    speed, used = (
        _median([as_number(line.get(name)) for line in steps]) for name in (SPEED, UTILIZATION)
    )
    cells = [
        rate(speed),
        percent(used),
        *(percent(_median([share.get(name, 0.0) for share in shares]), 1) for name in names),
    ]
    return Table(
        title="Time of a step",
        meaning=(
            f"Medians over {len(steps):,} steps. Utilisation: the model's FLOPs a second over "
            "those of a matrix product here, where training.utilization is true. Then shares of a "
            "step's time by part.",
        ),
        columns=("tok/s", "Utilisation", *(name.removesuffix(PART).capitalize() for name in names)),
        rows=(Row(cells=tuple(cells)),),
        text_columns=0,
    )


def _shares(line: dict[str, Any], names: list[str]) -> dict[str, float]:
    """Each part's share of a step; nothing where its time is not told."""
    seconds = {name: as_number(line.get(name)) or 0.0 for name in names}
    total = sum(seconds.values())
    return {name: part / total for name, part in seconds.items()} if total > 0 else {}


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
