"""The Hugging Face cache over opaque layer states."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from meanbank.core.state import State

UNDO = 256  # tokens that a recording cache can forget, unless told otherwise


class StateLayer(CacheLayerMixin):
    """One layer's state and the number of tokens it has seen."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, undo: int = UNDO) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0  # columns, padding included
        self.lengths: tuple[int, ...] = ()  # tokens of each row's sequence
        self.device: torch.device | None = None
        self.default_undo = undo
        self._undo, self.record_past = 0, False  # transformers sets the latter, too

    def store(self, state: State | None, seen: int, lengths: tuple[int, ...]) -> None:
        """Replace the state by that after `seen` columns, `lengths` tokens of each row."""
        self.state, self.seen, self.lengths = state, seen, lengths
        if state is not None:
            self.is_initialized = True
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

    def activate_past_recording(self, tokens: int | None = None) -> None:
        """See `MeanbankCache.activate_past_recording`."""
        tokens = self.default_undo if tokens is None else tokens
        if tokens < 1:
            raise ValueError(f"the tokens to be able to forget must be positive, got {tokens}")
        self._undo = max(tokens, self.undo)
        self.record_past = True

    @property
    def undo(self) -> int:
        """Tokens that calls from now on can be made to forget."""
        return self._undo if self.record_past else 0

    @property
    def undoable(self) -> int:
        """Most of the last tokens that `crop` can make every row forget."""
        return 0 if self.state is None else min(self.state.undoable, *self.lengths)

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether `crop` can forget a token."""
        return self.undoable > 0

    def cropped(self, tokens: int) -> State | None:
        """The state without the last `tokens` tokens; None where nothing is left."""
        if self.state is None or tokens == max(self.lengths):
            return None
        return self.state.crop(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """See `MeanbankCache.crop`."""
        tokens = _tokens_of(tokens_to_remove, self.undoable, self.lengths)
        if tokens:
            self.store(
                self.cropped(tokens),
                self.seen - tokens,
                tuple(length - tokens for length in self.lengths),
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
    """States of all layers of one batch of sequences, and last that of a stem that has one.

    undo: how many tokens it can forget again when it is told to record, unless told how many.
    """

    layers: list[StateLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, num_states: int, undo: int = UNDO) -> None:
        super().__init__(layers=[StateLayer(undo) for _ in range(num_states)])

    @property
    def seen(self) -> int:
        """Columns seen so far: the tokens of every row, where there was no padding."""
        return self.layers[0].seen

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row's sequence, without padding, since its last document began."""
        return self.layers[0].lengths

    @property
    def undo(self) -> int:
        """Tokens that calls from now on can be made to forget: 0 unless it records."""
        return self.layers[0].undo

    @property
    def undoable(self) -> int:
        """Most of the last tokens that `crop` can make every row forget."""
        return min(layer.undoable for layer in self.layers)

    def activate_past_recording(self, tokens: int | None = None) -> None:
        """Have the calls from now on keep what it takes to forget their last tokens.

        tokens: how many; by default 256, or the largest chunk of a KVM or OVQ layer if that is
        more. Asked for more than once, the most counts. What it costs is in `nbytes`.
        """
        for layer in self.layers:
            layer.activate_past_recording(tokens)

    def stop_past_recording(self) -> None:
        """Drop what is only kept to forget tokens."""
        for layer in self.layers:
            layer.record_past = False
            if layer.state is not None:
                layer.state = layer.state.limited(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row: -k for k of them.

        Afterwards the cache is as if it had never seen them, in every tensor (up to rounding in
        RWKV-7 layers, which read the tokens before them again); it can forget as many fewer. Only
        tokens seen while recording can be forgotten, the last `undoable`, each row's within its
        last document; padding is not counted. Raises ValueError for more, and changes nothing.
        """
        tokens = _tokens_of(tokens_to_remove, self.undoable, self.lengths)
        if tokens:
            states = [layer.cropped(tokens) for layer in self.layers]
            lengths = tuple(length - tokens for length in self.lengths)
            for layer, state in zip(self.layers, states, strict=True):
                layer.store(state, layer.seen - tokens, lengths)

    def nbytes(self) -> int:
        """Bytes of memory held, all layers and rows of the batch."""
        return sum(layer.nbytes() for layer in self.layers)


def _tokens_of(tokens_to_remove: int, undoable: int, lengths: tuple[int, ...]) -> int:
    """How many tokens to forget; ValueError where that cannot be."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop takes 0 or minus the number of tokens to forget, got {tokens_to_remove}"
        )
    tokens = -tokens_to_remove
    if tokens > min(lengths, default=0):
        raise ValueError(
            f"{tokens} tokens cannot be forgotten: a sequence has only {min(lengths, default=0)}"
        )
    if tokens > undoable:
        raise ValueError(
            f"{tokens} tokens cannot be forgotten, only {undoable}: a cache can forget what it "
            "reads after activate_past_recording(), and as many tokens as that is told"
        )
    return tokens
