"""The tables of `meanbank plan --context`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meanbank.cli.amounts import told
from meanbank.cli.tables import table

if TYPE_CHECKING:
    from rich.table import Table

    from meanbank.model.bank_plan import BankBreakEven
    from meanbank.model.memory_plan import LayerBytes, TrainingBytes
    from meanbank.training.footprint import Footprint, FootprintPlan

NAMES = {
    "rows": "memory rows",
    "exact tokens": "exact tokens (window)",
    "token ids": "ids of exact tokens",
    "matrix": "matrices",
    "last tokens": "last tokens (of shifts)",
}


def memory_tables(plan: FootprintPlan) -> list[Table]:
    """Bytes by part and by layer, and where banks pay off."""
    serving = plan.plan.serving
    both = (plan.plan, plan.full_attention)
    columns = ["", "this plan", "full attention"]
    held = {part for side in both for part in side.serving.state if side.serving.state[part]}
    parts = [part for part in NAMES if part in held] + sorted(held - set(NAMES))
    rows = [
        ("weights", *(told(side.serving.weights) for side in both)),
        ("tables over token ids", *(told(side.serving.tables) for side in both)),
        *(
            (NAMES.get(part, part), *(told(side.serving.state.get(part, 0)) for side in both))
            for part in parts
        ),
        ("+ while a prompt is read", *(told(side.serving.prefill) for side in both)),
        ("+ while a token is decoded", *(told(side.serving.decode) for side in both)),
        ("serving, at most", *(told(side.serving.total) for side in both)),
    ]
    if plan.budget is not None:
        label = f"largest context in {told(plan.budget)}"
        rows.append((label, *(_context(side) for side in both)))
    where = f"{serving.batch:,} x {serving.context:,} tokens ({serving.dtype})"
    tables = [
        table(f"bytes of serving {where}", columns, rows),
        table(
            "bytes by layer",
            ["layers", "memory", "values", "weights", "table", "state", "state, full attention"],
            _layers(serving.layers, plan.full_attention.serving.layers),
        ),
    ]
    trainings = [side.training for side in both if side.training is not None]
    if trainings:
        tables.append(_training(trainings))
    if plan.break_even:
        tables.append(_break_even(plan.break_even))
    return tables


def _training(both: list[TrainingBytes]) -> Table:
    """Bytes of a training step of both models."""
    step = both[0]
    rows = [
        ("weights", *(told(side.weights) for side in both)),
        ("optimizer", *(told(side.optimizer) for side in both)),
        ("activations, gradients", *(told(side.activations) for side in both)),
        ("training, at most", *(told(side.total) for side in both)),
    ]
    title = f"bytes of a training step, {step.batch:,} x {step.length:,} tokens ({step.dtype})"
    return table(title, ["", "this plan", "full attention"], rows)


def _context(side: Footprint) -> str:
    """The largest context that fits."""
    return "any" if side.any_context else f"{side.largest_context:,} tokens"


def _layers(ours: tuple[LayerBytes, ...], full: tuple[LayerBytes, ...]) -> list[tuple]:
    """A row for each run of layers that are alike."""
    rows: list[tuple] = []
    for layer, other in zip(ours, full, strict=True):
        sizes = [layer.weights, layer.table, sum(layer.state.values()), sum(other.state.values())]
        row = (layer.memory, layer.values, *map(told, sizes))
        number = layer.name.removeprefix("layers.")
        if rows and rows[-1][1:] == row:
            number, _ = f"{rows[-1][0].split('-')[0]}-{number}", rows.pop()
        rows.append((number, *row))
    return rows


def _break_even(points: tuple[BankBreakEven, ...]) -> Table:
    batch = points[0].batch
    rows = [
        (
            point.name.removeprefix("layers."),
            told(point.table),
            told(point.value_weights),
            f"{point.saved:,} B",
            f"{point.tokens:,}",
            "never" if point.context is None else f"{point.context:,}",
            "never" if point.batch_size is None else f"{point.batch_size:,}",
        )
        for point in points
    ]
    columns = ["layer", "table", "W_V saved", "saved a token", "exact tokens to pay off"]
    columns += [f"context at batch {batch:,}", "least batch"]
    shown = table("where a bank pays off (table against W_V and values)", columns, rows)
    shown.caption = (
        "Compressed rows hold values, so only exact tokens save some. With the table kept off the "
        "accelerator (CPU or disk), it saves W_V and values from token 1."
    )
    shown.caption_justify = "left"
    return shown
