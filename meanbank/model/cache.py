"""The Hugging Face cache over opaque layer states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from meanbank.core.state import State, beside


class StateLayer(CacheLayerMixin):
    """One layer's state and the number of tokens it has seen."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0  # columns, padding included
        self.lengths: tuple[int, ...] = ()  # tokens of each row's sequence
        self.device: torch.device | None = None

    def store(self, state: State, seen: int, lengths: tuple[int, ...]) -> None:
        """Replace the state by that after `seen` columns, `lengths` tokens of each row."""
        self.state, self.seen, self.is_initialized = state, seen, True
        self.lengths = lengths
        self.device = next((tensor.device for tensor in state.tensors()), self.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the first call of the model makes the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        raise NotImplementedError("a meanbank cache holds whole states; the model replaces them")

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized, self.lengths = None, 0, False, ()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a meanbank cache cannot forget tokens yet: compressed rows cannot be un-merged"
            )

    def _apply(self, change) -> None:
        if self.state is not None:
            self.state = change(self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda state: state.select(indices))
        self.lengths = tuple(self.lengths[row] for row in indices.tolist()) if self.lengths else ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat(repeats))
        self.lengths = tuple(length for length in self.lengths for _ in range(repeats))

    def offload(self) -> None:
        self._apply(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._apply(lambda state: state.to(self.device, non_blocking=True))

    def nbytes(self) -> int:
        """Bytes the state holds."""
        return self.state.nbytes() if self.state is not None else 0


class MeanbankCache(Cache):
    """States of all layers of one batch of sequences, and last that of a stem that has one."""

    layers: list[StateLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, num_states: int) -> None:
        super().__init__(layers=[StateLayer() for _ in range(num_states)])

    @property
    def seen(self) -> int:
        """Columns seen so far: the tokens of every row, where there was no padding."""
        return self.layers[0].seen

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row's sequence, without padding, since its last document began."""
        return self.layers[0].lengths

    def row(self, row: int) -> "MeanbankCache":
        """A cache of one of the rows, of its own."""
        alone = MeanbankCache(len(self.layers))
        for layer, held in zip(alone.layers, self.layers, strict=True):
            if held.state is not None:
                state = held.state.select(torch.tensor([row]))
                layer.store(state, held.seen, held.lengths[row : row + 1])
        return alone

    def take_rows(self, rows: Sequence["MeanbankCache"]) -> None:
        """Hold what the caches of single rows hold."""
        lengths = tuple(cache.lengths[0] for cache in rows)
        for index, layer in enumerate(self.layers):
            states = [cache.layers[index].state for cache in rows]
            layer.store(beside(states, lengths), rows[0].seen, lengths)

    def nbytes(self) -> int:
        """Bytes of memory held, all layers and rows of the batch."""
        return sum(layer.nbytes() for layer in self.layers)
