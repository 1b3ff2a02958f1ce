"""Tables of benchmark records: times, ratios, shares of limits, growth and first faster lengths."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meanbank.reports.files import csv_text, read_json_lines
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import DASH, binary_size, length, percent, rate

Record = dict[str, Any]
Points = dict[int, float]  # length -> seconds

GROWTH_BETWEEN = (4096, 65536)  # tokens
ARM_LABELS = {
    "sdpa": "PyTorch SDPA",
    "full": "full attention, tuned",
    "ours": "KVM",
    "reference": "KVM, reference",
    "bank": "bank: ids stored",
    "cached": "bank: values cached",
    "projected": "projected values",
    "resident": "resident",
    "mmap": "mapped file",
    "mmap-unfetched": "mapped file, rows not asked for first",
    "int8": "int8 in memory",
    "int8-mmap": "int8 rows of a mapped file",
}
BUDGET_LABELS = {"fixed": "256 rows", "sqrt": "16·√N rows", "saturating": "≤ 1024 rows"}


_NEEDED = {"bench", "phase", "dtype", "arm", "seconds"}


def load_records(paths: Iterable[Path]) -> list[Record]:
    """The records of JSON-lines files; ValueError for a file that is missing or has none."""
    records = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        found = [r for r in read_json_lines(path) if r.keys() >= _NEEDED]
        if not found:
            raise ValueError(f"{path} has no benchmark records, as --json writes them")
        records += found
    return records


def growth_exponent(points: Points, between: tuple[int, int] = GROWTH_BETWEEN) -> float | None:
    """The slope of log time over log length, by least squares: 1 is linear, 2 quadratic.

    Over the lengths within `between`, or the last two where it has fewer than two; None where
    there are no two.
    """
    shown = {n: t for n, t in points.items() if between[0] <= n <= between[1] and t > 0}
    if len(shown) < 2:
        shown = {n: points[n] for n in sorted(points)[-2:] if points[n] > 0}
    if len(shown) < 2:
        return None
    x = [math.log(n) for n in shown]
    y = [math.log(t) for t in shown.values()]
    middle, level = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True))
    return slope / sum((a - middle) ** 2 for a in x)


def first_faster(points: Points, baseline: Points) -> int | None:
    """The first length from which on every measured length is faster than the baseline."""
    found = None
    for tokens in sorted(set(points) & set(baseline), reverse=True):
        if points[tokens] >= baseline[tokens]:
            break
        found = tokens
    return found


def label(record: Record) -> str:
    """The name of an arm as tables and figures show it."""
    arm, budget = str(record["arm"]), str(record.get("budget"))
    if record["bench"] in ("model", "soak"):
        memory, _, bank = arm.partition("+")
        shown = "full attention" if memory == "full" else f"KVM, {BUDGET_LABELS[memory]}"
        return f"{shown} + bank" if bank else shown
    name = ARM_LABELS.get(arm, f"KVM, {arm}")
    return f"{name}, {BUDGET_LABELS[budget]}" if budget in BUDGET_LABELS else name


def series(records: Iterable[Record]) -> dict[tuple[str, str | None], list[Record]]:
    """Records by (arm, budget), each in the order of lengths; those measured last count."""
    found: dict[tuple[str, str | None], dict[int, Record]] = {}
    for record in records:
        key = (record["arm"], record.get("budget"))
        found.setdefault(key, {})[record["length"]] = record
    return {key: [by[n] for n in sorted(by)] for key, by in found.items()}


def points_of(records: Iterable[Record]) -> Points:
    """Seconds by length."""
    return {record["length"]: record["seconds"] for record in records}


def cells(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """Records by (bench, phase, dtype), in the order of their first ones."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["bench"], record["phase"], record["dtype"]), []).append(record)
    return found


def benchmark_tables(records: Sequence[Record]) -> list[Table]:
    """Times and comparisons of every bench, phase and dtype among the records."""
    tables = []
    for (bench, phase, dtype), found in cells(records).items():
        if bench == "model":
            tables.append(_model_table(phase, dtype, found))
        elif bench == "bank":
            tables.append(_bank_table(dtype, found))
        elif bench == "tables":
            tables.append(_tables_table(dtype, found))
        elif bench == "soak":
            tables.append(_soak_table(dtype, found))
        else:
            tables += _operator_tables(bench, phase, dtype, found)
    return tables


def _shown_lengths(bench: str, found: Sequence[Record]) -> list[int]:
    """All lengths; of a trajectory the powers of two, from 64 on where it is long, and the last."""
    lengths = sorted({record["length"] for record in found})
    if bench != "trajectory":
        return lengths
    powers = [n for n in lengths if n & (n - 1) == 0 and n >= min(64, lengths[-1])]
    return sorted({*powers, lengths[-1]})


def _operator_tables(bench: str, phase: str, dtype: str, found: Sequence[Record]) -> list[Table]:
    by_arm, clock = series(found), found[0]["clock"]
    lengths = _shown_lengths(bench, found)
    each = "a token" if phase == "decode" else "a pass"
    what = {"prefill": "prefill", "backward": "backward pass", "decode": "decode"}[phase]
    title = f"{'Trajectory: ' if bench == 'trajectory' else ''}{what}, {dtype}"
    rows = [
        Row(cells=(label(line[0]), *(_at(line, n, "seconds", seconds) for n in lengths)))
        for line in by_arm.values()
    ]
    times = Table(
        title=f"{title}: time {each} by tokens",
        meaning=(
            f"Means of {_clock(clock)} over the last sixth of the tokens up to there; arms took "
            "turns token by token."
            if bench == "trajectory"
            else f"Medians of {_clock(clock)}; arms took turns.",
        ),
        columns=("Arm", *map(length, lengths)),
        rows=tuple(rows),
    )
    return [times, _comparison(title, phase, by_arm)]


def _comparison(
    title: str, phase: str, by_arm: dict[tuple[str, str | None], list[Record]]
) -> Table:
    """Ratios and shares at the longest length, growth, and the first faster length."""
    last = max(record["length"] for line in by_arm.values() for record in line)
    size = {"backward": "peak_bytes", "decode": "state_bytes"}.get(phase)
    sized = bool(size) and any(size in line[-1] for line in by_arm.values())
    baseline = points_of(by_arm.get(("sdpa", None), []))
    rows = []
    for line in by_arm.values():
        points = points_of(line)
        faster = first_faster(points, baseline) if line[0]["arm"] != "sdpa" else None
        exponent = growth_exponent(points)
        rows.append(
            Row(
                cells=(
                    label(line[0]),
                    _at(line, last, "ratio_to_sdpa", times),
                    _at(line, last, "ratio_to_full", times),
                    _at(line, last, "share_of_limit", percent),
                    _at(line, last, "spread", percent) if line[-1]["rounds"] > 1 else DASH,
                    DASH if exponent is None else f"{exponent:.2f}",
                    DASH if faster is None else length(faster),
                    *((_at(line, last, size or "", binary_size),) if sized else ()),
                )
            )
        )
    meaning = (
        "× SDPA, × tuned: how many times faster than PyTorch's attention and than the best full "
        f"attention in plain PyTorch, at {length(last)} tokens. Of limit: share of the machine's "
        "measured ceilings that the operator's own work reaches. Spread: quartile distance over "
        "the median. Growth: exponent of time over length, "
        f"{_growth_words(by_arm)}. Faster from: the first length from which on it beats SDPA."
    )
    bytes_column = ("Peak",) if phase == "backward" else ("Held",)
    columns = ("Arm", "× SDPA", "× tuned", "Of limit", "Spread", "Growth", "Faster\nfrom")
    return Table(
        title=f"{title}: compared at {length(last)}",
        meaning=(meaning,),
        columns=(*columns, *bytes_column) if sized else columns,
        rows=tuple(rows),
    )


def _growth_words(by_arm: dict[tuple[str, str | None], list[Record]]) -> str:
    lengths = sorted({record["length"] for line in by_arm.values() for record in line})
    low, high = GROWTH_BETWEEN
    within = [n for n in lengths if low <= n <= high]
    used = within if len(within) >= 2 else lengths[-2:]
    if len(used) < 2:
        return "fitted where there are two lengths"
    return f"fitted from {length(used[0])} to {length(used[-1])}"


def _bank_table(dtype: str, found: Sequence[Record]) -> Table:
    by_arm = series(found)
    lengths = sorted({record["length"] for record in found})
    rows = []
    for (_, memory), line in sorted(by_arm.items(), key=lambda item: str(item[0][1])):
        shown = "full attention" if memory == "full" else f"KVM, {BUDGET_LABELS[str(memory)]}"
        values = (
            (_at(line, n, "seconds", seconds), _at(line, n, "ratio_to_cached", times))
            for n in lengths
        )
        flat = [cell for pair in values for cell in pair]
        held = _at(line, lengths[-1], "state_bytes", binary_size)
        share = _at(line, lengths[-1], "share_of_limit", percent)
        rows.append(Row(cells=(shown, ARM_LABELS[line[0]["arm"]], *flat, share, held)))
    columns = [name for n in lengths for name in (f"{length(n)}", "× cached")]
    return Table(
        title=f"Decode step of a whole bank layer, {dtype}",
        meaning=(
            "Time a token and layer, projections included; × cached: how many times faster than "
            "the same layer with its values in the state. Of limit and held are at "
            f"{length(lengths[-1])} tokens.",
        ),
        columns=("Memory", "Values", *columns, "Of limit", "Held"),
        rows=tuple(rows),
        text_columns=2,
    )


def _model_table(phase: str, dtype: str, found: Sequence[Record]) -> Table:
    by_arm = series(found)
    lengths = sorted({record["length"] for record in found})
    size, shown, shown_as = {
        "decode": ("state_bytes", "Held", binary_size),
        "passes": ("share_of_products", "Products", percent),
    }.get(phase, ("peak_bytes", "Peak", binary_size))
    rows = []
    for line in by_arm.values():
        speeds = (_at(line, n, "tokens_per_second", rate) for n in lengths)
        sizes = (_at(line, n, size, shown_as) for n in lengths)
        parameters = f"{line[0]['parameters'] / 1e6:.1f}M"
        rows.append(Row(cells=(label(line[0]), parameters, *speeds, *sizes)))
    what = {
        "training": "Forward, backward and an AdamW step on one sequence; peak: most bytes at a "
        "time besides weights and the optimizer's state.",
        "passes": "Forward and backward on one sequence; products: the time of their matrix "
        "products by themselves, over it.",
        "prefill": "Reading a prompt at once; peak: most bytes at a time besides the weights.",
        "decode": "One token after so many, the mean over a whole chunk, memory updates included; "
        "held: bytes of the cache.",
    }[phase]
    backbone = found[0].get("backbone", "gptalpha2")
    return Table(
        title=f"Whole models: {phase}, {dtype}"
        + (f", {backbone}" if backbone != "gptalpha2" else ""),
        meaning=(f"Tokens a second by length in tokens. {what}",),
        columns=(
            "Model",
            "Params",
            *(f"tok/s\n{length(n)}" for n in lengths),
            *(f"{shown}\n{length(n)}" for n in lengths),
        ),
        rows=tuple(rows),
    )


def _soak_table(dtype: str, found: Sequence[Record]) -> Table:
    rows = []
    for line in series(found).values():
        for record in line:
            sizes = (record[f"{name}_bytes"] for name in ("state", "peak", "resident"))
            shown = (DASH if size is None else binary_size(size) for size in sizes)
            cells = (label(record), length(record["length"]), rate(record["tokens_per_second"]))
            rows.append(Row(cells=(*cells, *shown)))
    return Table(
        title=f"A long text, {found[0]['piece']:,} tokens at a time, {dtype}",
        meaning=(
            "Tokens a second of the median piece since the line before. Held: bytes of the cache; "
            "peak: most bytes at a time besides the weights; resident: of the process, once the C "
            "library has given back what it keeps of freed memory.",
        ),
        columns=("Model", "Tokens", "tok/s", "Held", "Peak", "Resident"),
        rows=tuple(rows),
    )


def _tables_table(dtype: str, found: Sequence[Record]) -> Table:
    rows = []
    for record in found:
        sizes = (record[f"{name}_bytes"] for name in ("table", "resident", "read"))
        shown = (DASH if size is None else binary_size(size) for size in sizes)
        calls = (seconds(record[f"{name}_seconds"]) for name in ("cold", "warm"))
        cells = (label(record), *shown, *calls, rate(record["tokens_per_second"]))
        rows.append(Row(cells=cells))
    return Table(
        title=f"Tables over token ids, {dtype}",
        meaning=(
            "Resident: memory of the process since before the model was loaded, pages of the file "
            "that it has mapped included. First: a call of "
            f"{found[0]['length']} tokens once the system has forgotten the file, and read, what "
            "it had to get from the disk; again: the same call. Both are wall time.",
        ),
        columns=("Tables", "In file", "Resident", "Read", "First", "Again", "Decode\ntok/s"),
        rows=tuple(rows),
    )


def csv(records: Sequence[Record]) -> str:
    """The records as comma-separated values, a column for each field that is a plain value."""
    flat = [{**r, **{f"by_{k}": v for k, v in r.get("produced_by", {}).items()}} for r in records]
    plain = [{k: v for k, v in record.items() if not isinstance(v, dict | list)} for record in flat]
    return csv_text(plain)


def seconds(value: float | None) -> str:
    """`0.00123` -> `1.23 ms`."""
    if value is None:
        return DASH
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-6)} µs"


def times(value: float | None) -> str:
    """`2.345` -> `2.3`."""
    if value is None:
        return DASH
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _three(value: float) -> str:
    places = max(0, 2 - int(math.log10(value))) if value >= 1 else 2
    return f"{value:.{places}f}"


def _at(line: Sequence[Record], tokens: int, name: str, shown: Any) -> str:
    value = next((record.get(name) for record in line if record["length"] == tokens), None)
    return DASH if value is None else shown(value)


def _clock(clock: str) -> str:
    return "the process's CPU time" if clock == "cpu" else "wall time"
