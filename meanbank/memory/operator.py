"""Memories whose operator keeps rows of older tokens and the exact tokens of a window."""

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor

from meanbank.core.state import State, check_tensors
from meanbank.memory.base import Memory

# A budget that jumps by more rows than a chunk has tokens is caught up with later; so many updates
# back, that is over.
UPDATES_TO_CATCH_UP = 4096


@dataclasses.dataclass(frozen=True)
class OperatorState(State):
    """The operator's memory without window values, which `values` stores in their source's form."""

    memory: Any
    values: Tensor


class OperatorMemory(Memory):
    """Hands its operator the window's values, dense, and stores them as their source does.

    The operator's memory has `window_length` and `window_value`, which is None while it rests.
    """

    @abc.abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, gate_input: Tensor, memory: Any
    ) -> tuple[Tensor, Any]:
        """Call the operator: outputs (B, H, T, Dv) and its memory after the T tokens."""

    def forward(self, query, key, values, gate_input, state, span):
        memory, carried = None, 0
        if state is not None:
            carried = state.memory.window_length
            values = values.after(state.values)
        window_value, value = values.dense().to(query.dtype).tensor_split([carried], dim=2)
        if state is not None:
            memory = dataclasses.replace(state.memory, window_value=window_value)
        output, memory = self.attend(query, key, value, gate_input, memory)
        at_hand = carried + span.length
        kept = torch.arange(at_hand - memory.window_length, at_hand, device=query.device)
        memory = dataclasses.replace(memory, window_value=None)
        return output, OperatorState(memory, values.stored(kept))

    @abc.abstractmethod
    def check_memory(self, memory: Any, batch: int, seen: int) -> int:
        """Raise ValueError unless the operator's memory is one that `seen` tokens of `batch` rows
        can leave; returns the tokens of its window."""

    def check_state(self, state, batch, seen, stored):
        check_tensors(state, OperatorState)
        length = self.check_memory(state.memory, batch, seen)
        check_tensors(state, OperatorState, values=stored(length))
