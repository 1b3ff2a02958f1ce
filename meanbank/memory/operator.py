"""Memories whose operator keeps rows of older tokens and the exact tokens of a window."""

import abc
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from meanbank.core.derived import derived, keep
from meanbank.core.geometry import Geometry
from meanbank.core.precision import accumulator_dtype
from meanbank.core.record import Record
from meanbank.core.values import Values, joined
from meanbank.memory.base import Memory, MemoryState, Usage
from meanbank.ops.attention import BlockRule
from meanbank.ops.windowed import WindowedMemory

# A budget that jumps by more rows than a chunk has tokens is caught up with later; so many updates
# back, that is over.
UPDATES_TO_CATCH_UP = 4096


@dataclasses.dataclass(frozen=True)
class OperatorState(MemoryState):
    """The operator's memory without window values, which `values` stores in their source's form.

    depth: how many of the last tokens can be forgotten.
    past: for each time in these tokens that a block left the window, oldest first, the state just
        before it, with that block alone for a window.
    destination: (B, Hkv, S) int32, the row that each of the S tokens before the window went into,
        as `marked` says; None where that is not recorded.
    """

    part = "exact tokens"

    memory: WindowedMemory
    values: Tensor
    depth: int = 0
    past: tuple["OperatorState", ...] = ()
    destination: Tensor | None = None

    def usage(self) -> Usage:
        exact = self.memory.window_length
        return Usage(exact=exact, rows=self.memory.num_rows, older=self.memory.seen - exact)

    @property
    def undoable(self) -> int:
        return self.depth

    @property
    def has_provenance(self) -> bool:
        return self.destination is not None

    def crop(self, tokens: int) -> "OperatorState":
        self.check_crop(tokens)
        seen = self.memory.seen - tokens
        gone = [before for before in self.past if before.memory.seen >= seen]
        first, *later = [*gone, self]
        memories = [first.memory, *(state.memory for state in later)]
        length = sum(memory.window_length for memory in memories) - tokens
        memory: Any = first.memory.followed(memories[1:], length)
        destination = self.destination
        if destination is not None and gone:
            destination = destination[:, :, : seen - length].clone()
        return OperatorState(
            dataclasses.replace(memory, seen=seen),
            joined([state.values for state in (first, *later)], length),
            self.depth - tokens,
            self.past[: len(self.past) - len(gone)],
            destination,
        )

    def limited(self, record: Record) -> "OperatorState":
        depth = min(self.depth, record.undo)
        past = tuple(p for p in self.past if p.memory.seen >= self.memory.seen - depth)
        destination = self.destination if record.provenance else None
        return dataclasses.replace(self, depth=depth, past=past, destination=destination)


class OperatorMemory(Memory):
    """Hands its operator the window's values, dense, and stores them as their source does.

    window: the tokens that are exact. A token that begins a block of it makes the oldest block
    leave for the rows, where the window is full.
    """

    def __init__(self, geometry: Geometry, window: BlockRule) -> None:
        super().__init__(geometry)
        self.window = window

    @abc.abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None,
        memory: Any,
        destinations: list[Tensor] | None,
    ) -> tuple[Tensor, Any]:
        """Call the operator: outputs (B, H, T, Dv) and its memory after the T tokens.

        The memory has its window values; gate: what `gates` gave for the T tokens; destinations:
        where wanted, to be extended by the rows (B, Hkv, C), as `marked` says, that the tokens of
        each block that leaves the window go into.
        """

    @abc.abstractmethod
    def routing(self, memory: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The vectors whose products tell how alike tokens and rows are.

        memory: the operator's, just before the C tokens of its window leave it, as in
        `OperatorState.past`. Returns those of the tokens, of the rows that each would open, both
        (B, Hkv, C, Dk), and of the M rows that are there, (B, Hkv, M, Dk).
        """

    def gates(self, x: Tensor) -> Tensor | None:
        """What the operator takes from the layer's input (B, T, hidden_size): (B, Hkv, T)."""
        return None

    @abc.abstractmethod
    def older_rows_max(self, tokens: int) -> int:
        """A bound on the rows of older tokens within the first `tokens` tokens."""

    def rows_max(self, tokens: int) -> int:
        return self.older_rows_max(tokens) + min(tokens, self.window.span)

    def forward(self, query, key, values, gate_input, state, span):
        leaves = self._leaves(span.seen, span.total)
        if state is not None and span.length == 1 and not leaves and not torch.is_grad_enabled():
            return self._one_more(query, key, values, gate_input, state, span)
        memory: Any = None
        held, past, first = 0, (), span.seen
        if state is not None:
            memory, held, past = state.memory, state.depth, state.past
            first -= memory.window_length  # the position of the first token at hand
            values = values.after(state.values)
        dense, gate = values.dense().to(query.dtype), self.gates(gate_input)
        depth, outputs = min(span.record.undo, held + span.length), []
        destinations = self._destinations(state, key) if span.record.provenance else None
        left = [at for at in self._leaves(span.total - depth, span.total) if at >= span.seen]
        for start, stop in itertools.pairwise(sorted({span.seen, *left, span.total})):
            if memory is not None:
                if start in left:
                    past = (*past, self._before(memory, values, first))
                since = start - memory.window_length - first
                window_value = dense[:, :, since : start - first]
                memory = dataclasses.replace(memory, window_value=window_value)
            new = slice(start - span.seen, stop - span.seen)
            output, memory = self.attend(
                query[:, :, new],
                key[:, :, new],
                dense[:, :, start - first : stop - first],
                None if gate is None else gate[:, :, new],
                memory,
                destinations,
            )
            memory = dataclasses.replace(memory, window_value=None)
            outputs.append(output)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        kept = torch.arange(span.total - memory.window_length, span.total, device=key.device)
        new_state = OperatorState(
            memory, values.stored(kept - first), depth, past, _joined_destinations(destinations)
        )
        return output, new_state.limited(dataclasses.replace(span.record, undo=depth))

    def _one_more(self, query, key, values, gate_input, state, span):
        """`forward` of one token that only joins the window: nothing that is held is copied."""
        dense = derived(
            state,
            query.dtype,
            values.weights,
            lambda: values.standing_for(state.values).dense().to(query.dtype),
        )
        destinations = self._destinations(state, key) if span.record.provenance else None
        output, memory = self.attend(
            query,
            key,
            values.dense().to(query.dtype),
            self.gates(gate_input),
            dataclasses.replace(state.memory, window_value=dense),
            destinations,
        )
        dense = memory.window_value
        new_state = OperatorState(
            dataclasses.replace(memory, window_value=None),
            values.appended_to(state.values, self.window.size, dense),
            min(span.record.undo, state.depth + 1),
            state.past,
            _joined_destinations(destinations),
        ).limited(span.record)
        keep(new_state, query.dtype, values.weights, dense)
        return output, new_state

    def _destinations(self, state: OperatorState | None, key: Tensor) -> list[Tensor] | None:
        """Those recorded so far, to be extended; None where earlier tokens were not."""
        if state is None:
            return [torch.zeros(*key.shape[:2], 0, dtype=torch.int32, device=key.device)]
        return None if state.destination is None else [state.destination]

    def _leaves(self, start: int, stop: int) -> range:
        """Positions in [start, stop) of the tokens that make a block leave the window."""
        size, first = self.window.size, max(start, self.window.span)
        return range(-(-first // size) * size, stop, size)

    def _before(self, memory: Any, values: Values, first: int) -> OperatorState:
        """What `crop` needs to undo that the window's oldest block leaves.

        values: those at hand, from position `first`.
        """
        start, size = memory.seen - memory.window_length - first, self.window.size
        index = torch.arange(start, start + size, device=memory.window_key.device)
        memory = memory.followed((), size)
        rows = memory.rows and dataclasses.replace(memory.rows)  # without what is derived from them
        return OperatorState(dataclasses.replace(memory, rows=rows), values.stored(index))

    @abc.abstractmethod
    def rows_after(self, tokens: int) -> int:
        """The rows of older tokens after exactly `tokens` tokens."""

    def held_after(self, tokens: int) -> Usage:
        size = self.window.size
        start = max(0, -(-tokens // size) * size - self.window.span)  # of the window, lazily moved
        rows = self.rows_after(tokens) if start else 0
        return Usage(exact=tokens - start, rows=rows, older=start)

    def held_max(self, tokens: int, undo: int = 0) -> Usage:
        undo = min(undo, tokens)
        last = (tokens - 1) // self.window.size * self.window.size
        rows = self.older_rows_max(tokens)
        for before in range(last, last - undo, -self.window.size):
            rows += self.older_rows_max(before)
        return Usage(exact=min(tokens, self.window.span + undo), rows=rows)

    def state_like(self, tokens, batch, dtype, stored):
        held, sizes, precise = self.held_after(tokens), self.geometry, accumulator_dtype(dtype)
        rows = None
        if held.older:
            key, value, scale = (
                self.empty(batch, held.rows, width, precise)
                for width in (sizes.key_dim, sizes.value_dim, 1)
            )
            rows = (key, value, scale[..., 0])
        key = self.empty(batch, held.exact, sizes.key_dim, dtype)
        return OperatorState(self.memory_like(rows, key, tokens), stored(held.exact))

    @abc.abstractmethod
    def memory_like(
        self, rows: tuple[Tensor, Tensor, Tensor] | None, window_key: Tensor, seen: int
    ) -> WindowedMemory:
        """The operator's memory without data.

        rows: keys (B, Hkv, M, Dk), values (B, Hkv, M, Dv) and a number each (B, Hkv, M).
        """

    def row_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row, all heads: key, value and a number, in fp32 or better."""
        sizes = self.geometry
        numbers = sizes.num_kv_heads * (sizes.key_dim + sizes.value_dim + 1)
        return numbers * accumulator_dtype(dtype).itemsize


def marked(rows: Tensor, opened: Tensor) -> Tensor:
    """The rows that tokens went into, as `~row`, which is below 0, where they opened it."""
    return torch.where(opened, ~rows, rows)


def unmarked(marked_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that tokens went into, and which of them opened theirs."""
    opened = marked_rows < 0
    return torch.where(opened, ~marked_rows, marked_rows), opened


def _joined_destinations(parts: list[Tensor] | None) -> Tensor | None:
    """One int32 tensor; nothing is copied where nothing was added."""
    if parts is None:
        return None
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.int() for part in parts], dim=2)
