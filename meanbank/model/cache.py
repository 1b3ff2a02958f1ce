"""The Hugging Face cache over opaque layer states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from meanbank.core.record import Record
from meanbank.core.state import State, as_index, joined
from meanbank.memory import KVM, OVQ
from meanbank.model.config import MeanbankConfig
from meanbank.model.inspection import CacheDescription, Provenance, describe, provenance

UNDO = 256  # tokens that a recording cache can forget, unless told otherwise


class StateLayer(CacheLayerMixin):
    """One layer's state and the number of tokens it has seen."""

    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0  # columns, padding included
        self.lengths: tuple[int, ...] = ()  # tokens of each row's sequence
        self.documents: tuple[int | None, ...] = ()  # the id of each row's last document
        self.device: torch.device | None = None
        self._undo, self.record_past = 0, False  # transformers sets the latter, too
        self.provenance = False

    def store(
        self,
        state: State,
        seen: int,
        lengths: tuple[int, ...],
        documents: tuple[int | None, ...] | None = None,
    ) -> None:
        """Replace the state by that after `seen` columns, `lengths` tokens of each row.

        documents: the id of each row's last document, where ids were given.
        """
        self.state, self.seen, self.is_initialized = state, seen, True
        self.lengths, self.documents = lengths, documents or (None,) * len(lengths)
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
        self.state, self.seen, self.is_initialized = None, 0, False
        self.lengths, self.documents = (), ()

    def activate_past_recording(self, tokens: int = UNDO) -> None:
        """See `MeanbankCache.activate_past_recording`."""
        if tokens < 1:
            raise ValueError(f"the tokens to be able to forget must be positive, got {tokens}")
        self._undo = max(tokens, self.undo)
        self.record_past = True

    def record_as(self, others: Sequence["StateLayer"]) -> None:
        """Record what all of some other layers do."""
        self._undo = min(layer.undo for layer in others)
        self.record_past = self._undo > 0
        self.provenance = all(layer.provenance for layer in others)

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
            self.forget(tokens, self.cropped(tokens))

    def forget(self, tokens: int, state: State | None) -> None:
        """Replace the state by one that never saw the last `tokens` tokens of each row."""
        if state is None:
            self.reset()
            return
        lengths = tuple(length - tokens for length in self.lengths)
        self.store(state, self.seen - tokens, lengths, self.documents)

    def _apply(self, change) -> None:
        if self.state is not None:
            self.state = change(self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda state: state.select(indices))
        self._keep(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat(repeats))
        self._keep([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def _keep(self, rows: list[int]) -> None:
        if self.lengths:
            self.lengths = tuple(self.lengths[row] for row in rows)
            self.documents = tuple(self.documents[row] for row in rows)

    def offload(self) -> None:
        self._apply(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._apply(lambda state: state.to(self.device, non_blocking=True))

    def nbytes(self) -> int:
        """Bytes the state holds."""
        return self.state.nbytes() if self.state is not None else 0


class MeanbankCache(Cache):
    """States of all layers of one batch of sequences, and last that of a stem that has one.

    config: of the model that it is for; empty ones are best made by `MeanbankModel.new_cache`.
    """

    layers: list[StateLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: MeanbankConfig) -> None:
        count = config.num_hidden_layers + config.backbone_parts.stem.carries
        super().__init__(layers=[StateLayer() for _ in range(count)])
        self.config = config

    def fits(self, config: MeanbankConfig) -> bool:
        """Whether a model's layers have states of the same form and meaning."""
        return config is self.config or _layers_of(config) == _layers_of(self.config)

    @property
    def seen(self) -> int:
        """Columns seen so far: the tokens of every row, where there was no padding."""
        return self.layers[0].seen

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row's sequence, without padding, since its last document began."""
        return self.layers[0].lengths

    @property
    def record(self) -> Record:
        """What calls from now on keep besides, to forget tokens or to tell where they went."""
        return Record(undo=self.layers[0].undo, provenance=self.layers[0].provenance)

    @property
    def undoable(self) -> int:
        """Most of the last tokens that `crop` can make every row forget."""
        return min(layer.undoable for layer in self.layers)

    def activate_past_recording(self, tokens: int | None = None) -> None:
        """Have the calls from now on keep what it takes to forget their last tokens.

        tokens: how many; by default 256, or the largest chunk of a KVM or OVQ layer if that is
        more. Asked for more than once, the most counts. What it costs is in `nbytes`.
        """
        if tokens is None:
            memories = [plan.memory for plan in self.config.plans()]
            chunks = [memory.chunk_size for memory in memories if isinstance(memory, (KVM, OVQ))]
            tokens = max([UNDO, *chunks])
        for layer in self.layers:
            layer.activate_past_recording(tokens)

    def stop_past_recording(self) -> None:
        """Drop what is only kept to forget tokens."""
        for layer in self.layers:
            layer.record_past = False
            if layer.state is not None:
                layer.state = layer.state.limited(self.record)

    def activate_provenance(self) -> None:
        """Have the calls from now on record which row of its memory each token goes into.

        For KVM and OVQ layers, see `provenance`; 4 bytes a token and key/value head, which are in
        `nbytes` and not in files. Raises ValueError for a cache that has tokens already.
        """
        if self.lengths:
            raise ValueError(
                "provenance is recorded from the first token on; begin with a new cache"
            )
        for layer in self.layers:
            layer.provenance = True

    def provenance(self, layer: int, sequence: int = 0) -> Provenance:
        """Which tokens went into which row of one layer's memory, for one sequence of the batch.

        Positions count from the start of the sequence's last document. Raises ValueError where
        there is no such layer or sequence, or nothing was recorded.
        """
        states = self._held()[: self.config.num_hidden_layers]
        for name, index, count in (
            ("layer", layer, len(states)),
            ("sequence", sequence, len(self.lengths)),
        ):
            if not 0 <= index < count:
                raise ValueError(f"there is no {name} {index}: the cache has {count}")
        return provenance(states[layer], sequence)

    def describe(self) -> CacheDescription:
        """Rows, tokens and bytes of each layer. Raises ValueError for an empty cache.

        >>> print(cache.describe())
        """
        return describe(self.config, self._held(), self.lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row: -k for k of them.

        Afterwards the cache is as if it had never seen them, in every tensor (up to rounding in
        RWKV-7 layers, which read the tokens before them again); it can forget as many fewer. Only
        tokens seen while recording can be forgotten, the last `undoable`, each row's within its
        last document; padding is not counted. A cache that forgets everything is as a new one.
        Raises ValueError for more, and changes nothing.
        """
        tokens = _tokens_of(tokens_to_remove, self.undoable, self.lengths)
        if tokens:
            states = [layer.cropped(tokens) for layer in self.layers]
            for layer, state in zip(self.layers, states, strict=True):
                layer.forget(tokens, state)

    @property
    def documents(self) -> tuple[int | None, ...]:
        """The id of each row's last document, None where none was given."""
        return self.layers[0].documents

    def nbytes(self) -> int:
        """Bytes of memory held, all layers and rows of the batch; what layers share counts once.

        What decoding keeps besides, `prepared_nbytes`, comes on top.
        """
        states = [layer.state for layer in self.layers if layer.state is not None]
        tensors = {t.data_ptr(): t for state in states for t in state.tensors()}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def prepared_nbytes(self) -> int:
        """Bytes that decoding a token leaves besides, so that the next one is quick; 0 before.

        Room for a chunk of tokens at most; of KVM layers the rows once more, as queries meet them;
        of a bank's layers the window's values. Copies, selections and files do not have it.
        """
        return sum(layer.state.prepared_nbytes() for layer in self.layers if layer.state)

    def select(self, rows: Sequence[int] | Tensor) -> "MeanbankCache":
        """A new cache of some rows of the batch, in that order; this one stays as it is.

        A row may be taken more than once. If this one records, so does the new one. Raises
        ValueError for rows that there are not.
        """
        batch = len(self.lengths)
        wanted = [int(row) for row in rows]
        wrong = [row for row in wanted if not 0 <= row < batch]
        if wrong or not wanted:
            what = f"no row {wrong[0]}" if wrong else "nothing to select"
            raise ValueError(f"there is {what}: the cache holds {batch} sequences")
        chosen = self._changed(
            self.seen,
            tuple(self.lengths[row] for row in wanted),
            tuple(self.documents[row] for row in wanted),
            [
                state if wanted == [*range(batch)] else state.select(as_index(wanted))
                for state in self._held()
            ],
        )
        return chosen.recording_as([self])

    def repeat(self, times: int) -> "MeanbankCache":
        """A new cache with every row `times` times, copies next to each other.

        This one stays as it is, so a context that is read once can be continued in many ways.
        Raises ValueError unless `times` is positive.
        """
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}")
        return self.select([row for row in range(len(self.lengths)) for _ in range(times)])

    @classmethod
    def join(cls, caches: Sequence["MeanbankCache"]) -> "MeanbankCache":
        """A new cache of all rows of some caches, one after the other; those stay as they are.

        Rows may be at different places. `seen` is the largest: in an attention mask over all
        columns the others' rows are padded on the left. It records what all of them do.
        Raises ValueError for caches of different models or devices, or without tokens.
        """
        caches = list(caches)
        if not caches:
            raise ValueError("there is nothing to join")
        if not all(cache.fits(caches[0].config) for cache in caches):
            raise ValueError("caches of different models cannot be joined")
        lengths = [cache.lengths for cache in caches]
        columns = zip(*(cache._held() for cache in caches), strict=True)
        whole = [joined(states, lengths) for states in columns]
        seen = max(cache.seen for cache in caches)
        documents = sum((cache.documents for cache in caches), ())
        return caches[0]._changed(seen, sum(lengths, ()), documents, whole).recording_as(caches)

    def emptied(self) -> "MeanbankCache":
        """A new cache without tokens that records what this one does."""
        return MeanbankCache(self.config).recording_as([self])

    def recording_as(self, caches: Sequence["MeanbankCache"]) -> "MeanbankCache":
        """This cache, from now on recording what all of some caches do."""
        for layer, *others in zip(self.layers, *(cache.layers for cache in caches), strict=True):
            layer.record_as(others)
        return self

    def take(self, other: "MeanbankCache") -> None:
        """Hold what another cache does from now on, and record what this one did."""
        self.layers = other.recording_as([self]).layers

    def _held(self) -> list[State]:
        """The states of the layers; ValueError where there are none."""
        states = [layer.state for layer in self.layers if layer.state is not None]
        if not states:
            raise ValueError("the cache is empty: it holds no sequences yet")
        return states

    def _changed(
        self,
        seen: int,
        lengths: tuple[int, ...],
        documents: tuple[int | None, ...],
        states: Sequence[Any],
    ) -> "MeanbankCache":
        cache = MeanbankCache(self.config)
        for layer, state in zip(cache.layers, states, strict=True):
            layer.store(state, seen, lengths, documents)
        return cache

    def save(
        self, path: str | Path, model: Any, *, tokenizer: Any = None, overwrite: bool = False
    ) -> None:
        """Write what was read to one safetensors file, of `nbytes()` bytes and a header.

        model: whose cache it is; its fingerprint goes into the file, and the tokenizer's, if given.
        The file is whole or not there. What is only kept to forget tokens is not in it. Raises
        ContextFileError, in one line: the file exists (and `overwrite` is not set), the cache is
        empty or not this model's, or holds NaN.
        """
        from meanbank.model.context_file import save_context

        save_context(path, self, model, tokenizer=tokenizer, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path, model: Any, *, tokenizer: Any = None) -> "MeanbankCache":
        """A new cache from a file that `save` wrote, on the model's device, to go on from.

        The file may come from anyone: no code in it is run, and its structure, sizes, checksums,
        numbers and fingerprints are checked before the cache is made. Raises ContextFileError, in
        one line, for a file that is damaged, of another version, model or (if given) tokenizer.
        Going on is bit-exact on the same machine, build, dtype and thread count.
        """
        from meanbank.model.context_file import load_context

        return load_context(path, model, tokenizer=tokenizer)

    def restore(self, path: str | Path, model: Any, *, tokenizer: Any = None) -> Self:
        """Replace what this cache holds by what a file does; see `load`. All or nothing."""
        self.take(MeanbankCache.load(path, model, tokenizer=tokenizer))
        return self


def _layers_of(config: MeanbankConfig) -> tuple:
    """What the states of a model's layers depend on."""
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    sizes += (config.head_dim, config.value_head_dim)
    shared = (config.rope_theta, config.mlp_token_shift)  # of all layers
    return config.backbone, *sizes, *shared, config.layers


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
