"""What a cache holds: rows, tokens and bytes of each layer, and where its tokens went."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meanbank.core.record import NOTHING
from meanbank.core.state import RowStates, State, rows_of
from meanbank.memory.base import MemoryState, Usage
from meanbank.memory.operator import OperatorState, unmarked
from meanbank.model.attention import AttentionState
from meanbank.model.block import BlockState
from meanbank.model.config import MeanbankConfig
from meanbank.model.plan import LayerPlan

COLUMNS = ("layer", "memory", "values", "exact", "rows", "budget", "appended", "merged", "bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerDescription:
    """One layer of a cache; a tuple has a number for each sequence of the batch.

    memory, values: their types in the layer plan.
    exact: tokens held as they are; rows: compressed rows; budget: rows allowed when tokens were
        last taken in, None for a memory without a budget.
    appended: tokens that got rows of their own after the memory's first ones; merged: tokens added
        to rows that were there.
    nbytes: bytes of all sequences by what they are for: "rows", "exact tokens", "matrix", "last
        tokens" (of token shifts); "record", what is only kept for rollback and provenance;
        "prepared", what decoding keeps besides, see `MeanbankCache.prepared_nbytes`.
    """

    name: str
    memory: str
    values: str
    exact: tuple[int, ...]
    rows: tuple[int, ...]
    budget: tuple[int | None, ...]
    appended: tuple[int, ...]
    merged: tuple[int, ...]
    nbytes: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheDescription:
    """What a cache holds after `lengths` tokens of each sequence; printed, it is a table."""

    lengths: tuple[int, ...]
    layers: tuple[LayerDescription, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers; what layers share counts in each."""
        return sum(sum(layer.nbytes.values()) for layer in self.layers)

    def __str__(self) -> str:
        rows = [COLUMNS, *(_line(layer) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        tokens = f"{_span(self.lengths)} tokens of {len(self.lengths):,} sequences"
        return "\n".join([f"{tokens}, {self.nbytes:,} bytes", *lines])


@dataclasses.dataclass(frozen=True, eq=False)
class Provenance:
    """Where the tokens of one sequence went that one layer no longer holds as they are.

    rows: (Hkv, S) int32; the row that the token at each of the first S positions went into, for
        every key/value head. opened: (Hkv, S), whether it opened that row.
    """

    rows: Tensor
    opened: Tensor

    def tokens(self, head: int, row: int) -> Tensor:
        """Positions of the tokens that went into a row, ascending.

        One of them opened it: the first, but for KVM's tokens that were merged into the rows of
        later tokens of their block.
        """
        return (self.rows[head] == row).nonzero()[:, 0]


def describe(
    config: MeanbankConfig, states: Sequence[State], lengths: tuple[int, ...]
) -> CacheDescription:
    """See `MeanbankCache.describe`."""
    plans: list[LayerPlan | None] = [*config.plans()]
    plans += [None] * (len(states) - len(plans))  # of a stem
    layers = (
        _described(f"layers.{number}" if plan else "stem", plan, state, lengths)
        for number, (plan, state) in enumerate(zip(plans, states, strict=True))
    )
    return CacheDescription(lengths=lengths, layers=tuple(layers))


def provenance(state: State, sequence: int) -> Provenance:
    """See `MeanbankCache.provenance`."""
    held = _memory(state)
    if isinstance(held, RowStates):
        some = held.states[0] if held.states else None
        held, sequence = rows_of(held, (sequence,)), 0
        if held is None and isinstance(some, OperatorState):  # a sequence without tokens
            heads = some.memory.window_key.shape[1]
            rows = torch.empty(heads, 0, dtype=torch.int32)
            return Provenance(rows, rows.bool())
    if not isinstance(held, OperatorState):
        raise ValueError("the layer has no memory of compressed rows")
    if held.destination is None:
        raise ValueError(
            "where tokens went was not recorded: call activate_provenance() before the first of "
            "them is read"
        )
    return Provenance(*unmarked(held.destination[sequence]))


def _memory(state: Any) -> Any:
    """The state of a block's memory, if it has one."""
    if isinstance(state, BlockState) and isinstance(state.attention, AttentionState):
        return state.attention.memory
    return None


def _described(
    name: str, plan: LayerPlan | None, state: State, lengths: tuple[int, ...]
) -> LayerDescription:
    usages = _usages(_memory(state), len(lengths))
    config = plan and plan.memory
    first = config.first_rows if config else 0
    nbytes = state.limited(NOTHING).nbytes_by_part()
    besides = {
        "record": state.nbytes() - sum(nbytes.values()),
        "prepared": state.prepared_nbytes(),
    }
    return LayerDescription(
        name=name,
        memory=plan.memory.tag if plan else "-",
        values=plan.values.tag if plan else "-",
        exact=tuple(usage.exact for usage in usages),
        rows=tuple(usage.rows for usage in usages),
        budget=tuple(config.rows_wanted(seen) if config else None for seen in lengths),
        appended=tuple(max(0, usage.rows - first) for usage in usages),
        merged=tuple(usage.older - usage.rows for usage in usages),
        nbytes=nbytes | {part: size for part, size in besides.items() if size},
    )


def _usages(held: Any, batch: int) -> list[Usage]:
    """What a memory holds of each sequence; nothing of those that have no tokens."""
    usages = [Usage(exact=0)] * batch
    if isinstance(held, RowStates):
        for rows, part in zip(held.rows, held.states, strict=True):
            for row, usage in zip(rows, _usages(part, len(rows)), strict=True):
                usages[row] = usage
    elif isinstance(held, MemoryState):
        usages = [held.usage()] * batch
    return usages


def _line(layer: LayerDescription) -> tuple[str, ...]:
    numbers = (layer.exact, layer.rows, layer.budget, layer.appended, layer.merged)
    total = sum(layer.nbytes.values())
    return (layer.name, layer.memory, layer.values, *map(_span, numbers), f"{total:,}")


def _span(numbers: Sequence[int | None]) -> str:
    """The numbers of all sequences in short: one, or the least and the largest."""
    found = sorted({number for number in numbers if number is not None})
    if not found:
        return "-"
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"
