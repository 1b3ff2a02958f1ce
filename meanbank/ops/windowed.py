"""What the memories of KVM and OVQ have in common: rows of older tokens behind an exact window."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from meanbank.core.state import State


class WindowedMemory(State):
    """Base of operator memories.

    rows: the older tokens; seen: tokens so far. Every field `window_*` is (B, Hkv, L, ...), of the
    last L tokens, or None.
    """

    part = "exact tokens"

    rows: Any
    window_key: Tensor
    window_value: Tensor | None
    seen: int

    @property
    def window_length(self) -> int:
        return self.window_key.shape[2]

    @property
    def num_rows(self) -> int:
        """Rows of older tokens."""
        return 0 if self.rows is None else self.rows.key.shape[2]

    def followed(self, later: Sequence[Self], count: int) -> Self:
        """These rows, and the first `count` tokens of this window and those that follow it."""
        memory: Any = self
        windows = {}
        for field in dataclasses.fields(memory):
            if field.name.startswith("window_") and getattr(self, field.name) is not None:
                parts = [getattr(part, field.name) for part in (self, *later)]
                windows[field.name] = torch.cat(parts, dim=2)[:, :, :count].clone()
        return dataclasses.replace(memory, **windows)
