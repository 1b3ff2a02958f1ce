"""The tables of a study: its arms, their scores, their memories."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from meanbank.reports.files import as_count, as_number, as_objects
from meanbank.reports.study.results import Arm, Group, Study
from meanbank.reports.study.statistics import estimate, mean_of
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import (
    DASH,
    binary_size,
    duration,
    length,
    listed,
    measured,
    operations,
    short_count,
)

_CONTEXTS = (32 * 2**10, 2**20)  # tokens at which memory is said, where they were measured


def arms_table(group: Group) -> Table:
    """What each arm is and costs."""
    contexts = _shown_contexts(group)
    rows = []
    for arm in group.arms:
        sizes = _bytes_at(group, arm)
        cells = (
            arm.label,
            _same([job.parameters for job in arm.jobs], short_count),
            _same([job.tokens for job in arm.jobs], short_count)
            if arm.is_trained_here
            else "not trained\nhere",
            _same([job.flops for job in arm.jobs], operations),
            *(binary_size(sizes.get(tokens)) for tokens in contexts),
            duration(mean_of(job.training_seconds for job in arm.jobs)),
            ", ".join(str(job.seed) for job in arm.jobs if not job.model) or DASH,
        )
        rows.append(Row(cells=cells))
    columns = (
        "Arm",
        "Parameters",
        "Tokens",
        "Training\nFLOPs",
        *(f"Memory\n{length(tokens)}" for tokens in contexts),
        "Training\ntime",
        "Seeds",
    )
    return Table(title=group.label, meaning=(), columns=columns, rows=tuple(rows))


def _bytes_at(group: Group, arm: Arm) -> dict[int, float]:
    found = {}
    for title in group.titles("memory")[:1]:
        for _, evaluation in arm.evaluations(title)[:1]:  # the same for every seed
            for row in as_objects(evaluation.results.get("contexts")):
                tokens, size = as_count(row.get("tokens")), as_number(row.get("bytes"))
                if tokens is not None and size is not None:
                    found[tokens] = size
    return found


def _shown_contexts(group: Group) -> list[int]:
    known = sorted({tokens for arm in group.arms for tokens in _bytes_at(group, arm)})
    preferred = [tokens for tokens in _CONTEXTS if tokens in known]
    return preferred or list(dict.fromkeys([*known[:1], *known[-1:]]))


def _same(values: Iterable[Any], say: Any) -> str:
    """The value, or all of them where seeds differ."""
    return ", ".join(dict.fromkeys(say(v) for v in values if v is not None)) or DASH


def score_tables(group: Group) -> list[Table]:
    """Scores of every arm: one table of single numbers, and one for each that has several.

    Scores of memory evaluations are left out: the table of arms has them.
    """
    names = dict.fromkeys(name for arm in group.arms for job in arm.jobs for name in job.scores)
    apart = set(group.titles("memory"))
    families: dict[str, list[str]] = {}
    for name in names:
        family, _ = _table_and_column(name)
        if family not in apart:
            families.setdefault(family, []).append(name)
    return [_score_table(group, family, found) for family, found in sorted(families.items())]


def _table_and_column(score: str) -> tuple[str, str]:
    """`recall@512/48` -> `recall`, `512/48`; `core:copa` -> `core`, `copa`; `bpb` -> ``, `bpb`."""
    for mark in "@:":
        family, found, column = score.partition(mark)
        if found:
            return family, column
    return "", score


def _score_table(group: Group, family: str, names: list[str]) -> Table:
    rows = (Row(cells=(arm.label, *(_score(arm, name) for name in names))) for arm in group.arms)
    return Table(
        title=f"Scores: {family}" if family else "Scores",
        meaning=(
            "Mean over seeds ± half of its 95 % t interval; the small numbers are the seeds in "
            "order.",
        ),
        columns=("Arm", *(_table_and_column(name)[1] for name in names)),
        rows=tuple(rows),
    )


def _score(arm: Arm, name: str) -> str:
    found = list(arm.values(name).values())
    over = estimate(found)
    if over is None:
        return DASH
    if not arm.is_trained_here:
        return measured(over.mean)
    if over.half_width is None:
        return f"{measured(over.mean)}\n1 seed"
    seeds = ", ".join(measured(value, like=over.mean) for value in found)
    return f"{measured(over.mean)} ± {measured(over.half_width, like=over.mean)}\n{seeds}"


def memory_statistics(group: Group) -> list[Table]:
    """What memories did with tokens, by layer, a table an evaluation."""
    return [_statistics(group, title) for title in group.titles("memory-statistics")]


def _statistics(group: Group, title: str) -> Table:
    found: list[tuple[str, int, dict[str, float]]] = []
    for arm in group.arms:
        layers: dict[int, list[Mapping[str, Any]]] = {}
        for _, evaluation in arm.evaluations(title):
            for record in as_objects(evaluation.results.get("layers")):
                layer = as_count(record.get("layer"))
                if layer is not None:
                    layers.setdefault(layer, []).append(record)
        found += [(arm.label, layer, _means(layers[layer])) for layer in sorted(layers)]
    names = list(dict.fromkeys(name for _, _, values in found for name in values))
    return Table(
        title="What the memories did" + ("" if title == "memory-statistics" else f": {title}"),
        meaning=("By layer, means over seeds (and over heads, where there is a number a head).",),
        columns=("Arm", "Layer", *(name.replace("_", "\n", 1).replace("_", " ") for name in names)),
        rows=tuple(
            Row(cells=(label, str(layer), *(_statistic(values.get(name)) for name in names)))
            for label, layer, values in found
        ),
        text_columns=2,
    )


def _statistic(value: float | None) -> str:
    whole = value is not None and math.isfinite(value) and value == int(value)
    return f"{value:,.0f}" if whole else measured(value)


def _means(records: list[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the fields that are numbers or lists of numbers."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "layer":
                each = value if isinstance(value, list) else [value]
                found = [number for one in each if (number := as_number(one)) is not None]
                values.setdefault(name, []).extend(found)
    return {name: math.fsum(found) / len(found) for name, found in values.items() if found}


def absent_table(study: Study) -> Table | None:
    """Jobs without results; None where there are none."""
    if not study.absent:
        return None
    labels = {(g.name, arm.name): (g.label, arm.label) for g in study.groups for arm in g.arms}
    alike: dict[tuple[str, str, str], list[int]] = {}
    for job in study.absent:
        what = job.group, job.arm, job.reason or "was not run"
        alike.setdefault(what, []).append(job.seed)
    rows = (
        Row(cells=(*labels[group, arm], listed([*map(str, seeds)]), reason))
        for (group, arm, reason), seeds in alike.items()
    )
    return Table(
        title="Failed and missing runs",
        meaning=("These count in no mean.",),
        columns=("Group", "Arm", "Seeds", "What happened"),
        rows=tuple(rows),
        text_columns=4,
    )
