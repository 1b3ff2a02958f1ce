"""Context files: what a model has read, to go on from in another process without reading it again.

One safetensors file holds the states of all layers, and in its header all there is to know about
them. A file may come from anyone: nothing in it is run, and everything is checked before a cache is
made of it.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanbank.core.errors import ContextFileError, one_line
from meanbank.core.precision import accumulator_dtype
from meanbank.core.record import NOTHING
from meanbank.core.state import State, check_like
from meanbank.core.state_tree import flatten, restored
from meanbank.core.tensor_file import (
    Entry,
    Header,
    open_tensors,
    read_header,
    read_tensor,
    write_tensors,
)
from meanbank.model.cache import MeanbankCache
from meanbank.model.fingerprint import model_fingerprint, tokenizer_fingerprint

FORMAT, VERSION = "meanbank context", "1"
NONE = "none"  # in place of a tokenizer's fingerprint
MAX_ROWS = 65_536
ORIGIN = {
    "library": r"[\w.+-]{1,40}",
    "model": r"[0-9a-f]{64}",
    "tokenizer": r"[0-9a-f]{64}|none",
    "dtype": r"\w{1,16}",
}
STATE = "state:"  # the prefix of a state's words
_NUMBERS = re.compile(r"\[(?:0|[1-9]\d{0,15})(?:,(?:0|[1-9]\d{0,15}))*\]")
_IDS = re.compile(r"\[(?:null|-?(?:0|[1-9]\d{0,18}))(?:,(?:null|-?(?:0|[1-9]\d{0,18})))*\]")
_KEYS = re.compile(r".*?\.(rows\.key|window_key|key)")
_TOP = re.compile(re.escape(STATE) + r"(layers\.\d+|stem)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer in a file; rows: compressed ones, and exact tokens, of the longest row."""

    name: str
    memory: str
    rows: int
    tokens: int
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextSummary:
    """What the header of a context file says.

    seen: columns read; lengths: tokens of each row, without padding, of its last document.
    model, tokenizer: fingerprints; tokenizer is None where the file was written without.
    nbytes: of the states, file_nbytes: of the whole file.
    """

    version: str
    written_by: str
    model: str
    tokenizer: str | None
    dtype: str
    seen: int
    lengths: tuple[int, ...]
    layers: tuple[LayerSummary, ...]
    nbytes: int
    file_nbytes: int


def save_context(
    path: str | Path,
    cache: MeanbankCache,
    model: Any,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> None:
    """See `MeanbankCache.save`."""
    path = Path(path)
    states = [layer.state.limited(NOTHING) for layer in cache.layers if layer.state is not None]
    if not states:
        raise ContextFileError("the cache is empty: there is nothing to save")
    backbone = model.base_model
    names = state_names(backbone)
    if len(names) != len(cache.layers):
        raise ContextFileError(f"the cache has {len(cache.layers)} layers, the model {len(names)}")
    _check_states(backbone, states, cache.lengths)
    from meanbank import __version__

    words = {
        "format": FORMAT,
        "version": VERSION,
        "library": __version__,
        "model": model_fingerprint(model),
        "tokenizer": NONE if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "dtype": _name(backbone.dtype),
        "seen": str(cache.seen),
        "lengths": json.dumps(cache.lengths, separators=(",", ":")),
        "documents": json.dumps(cache.documents, separators=(",", ":")),
    }
    tensors: dict[str, Tensor] = {}
    tree: dict[str, str] = {}
    with _told("the cache does not fit the format"):
        for name, state in zip(names, states, strict=True):
            flatten(state, name, tensors, tree)
    words.update((STATE + name, word) for name, word in tree.items())
    try:
        write_tensors(path, tensors, words, overwrite=overwrite)
    except FileExistsError:
        raise ContextFileError(f"{path} exists already; overwrite=True replaces it") from None


def load_context(path: str | Path, model: Any, *, tokenizer: Any = None) -> MeanbankCache:
    """See `MeanbankCache.load`."""
    backbone = model.base_model
    with _named(path), open_tensors(Path(path)) as file:
        header = read_header(file)
        words = dict(header.words)
        _check_format(words)
        seen, lengths = _check_place(words)
        documents = _check_documents(words, len(lengths))
        _check_origin(words, backbone, model, tokenizer)
        empty = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in header.entries.items()
            if _allowed(entry, backbone.dtype)
        }
        states = _rebuilt(backbone, empty, words, lengths)

        def read(entry: Entry) -> Tensor:
            tensor = read_tensor(file, header, entry)
            if not tensor.is_floating_point() and tensor.numel():
                _check_ids(entry.name, tensor, backbone.config.vocab_size)
            return tensor.to(backbone.device)

        states = _filled(states, header, read, state_names(backbone))
        _check_states(backbone, states, lengths)  # now with numbers
    cache = backbone.new_cache()
    for layer, state in zip(cache.layers, states, strict=True):
        layer.store(state, seen, lengths, documents)
    return cache


def read_summary(path: str | Path) -> ContextSummary:
    """What a context file's header says, without the model.

    The header's checksum, sizes and offsets are checked, the tensors are not read. Raises
    ContextFileError.
    """
    with _named(path), open_tensors(Path(path)) as file:
        header = read_header(file)
        words = dict(header.words)
        _check_format(words)
        seen, lengths = _check_place(words)
        origin = {name: words.get(name, "") for name in ORIGIN}
        for name, form in ORIGIN.items():
            if re.fullmatch(form, origin[name]) is None:
                raise ContextFileError(f"what it says of its {name} is malformed")
    entries = list(header.entries.values())
    if not all(re.fullmatch(r"[\w.]+", entry.name) for entry in entries):
        raise ContextFileError("names of its tensors are malformed")
    return ContextSummary(
        version=VERSION,
        written_by=origin["library"],
        model=origin["model"],
        tokenizer=None if origin["tokenizer"] == NONE else origin["tokenizer"],
        dtype=origin["dtype"],
        seen=seen,
        lengths=lengths,
        layers=_layers(words, entries),
        nbytes=sum(entry.stop - entry.start for entry in entries),
        file_nbytes=header.nbytes,
    )


def state_names(backbone: Any) -> list[str]:
    """Names of a model's states in files, in the order of its cache."""
    layers = [f"layers.{number}" for number in range(len(backbone.layers))]
    return [*layers, "stem"] if backbone.stem.carries else layers


@contextlib.contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Errors in one line that begins with the file's name."""
    try:
        yield
    except ContextFileError as error:
        words = one_line(error)
        raise ContextFileError(words if str(path) in words else f"{path}: {words}") from None
    except OSError as error:
        raise ContextFileError(f"cannot read {path}: {error.strerror}") from None


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever checks meet in a tree that is not as they expect becomes a ContextFileError."""
    try:
        yield
    except ContextFileError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ContextFileError(f"{what}: {one_line(error)}") from None
    except RuntimeError as error:  # RecursionError, and torch's for sizes
        raise ContextFileError(f"{what}: {one_line(error)[:200]}") from None


def _check_format(words: dict[str, str]) -> None:
    if words.get("format") != FORMAT:
        raise ContextFileError("it is a safetensors file, but not a context")
    if words.get("version") != VERSION:
        found = words.get("version", "")[:20]
        raise ContextFileError(f"its format has version {found!r}, this library reads {VERSION}")


def _check_place(words: dict[str, str]) -> tuple[int, tuple[int, ...]]:
    """Columns seen, and tokens of each row."""
    seen, lengths = words.get("seen", ""), words.get("lengths", "")
    if _NUMBERS.fullmatch(f"[{seen}]") is None or _NUMBERS.fullmatch(lengths) is None:
        raise ContextFileError("it does not say how many tokens were read")
    columns, *more = json.loads(f"[{seen}]")
    counts = tuple(json.loads(lengths))
    if more or not columns or len(counts) > MAX_ROWS or max(counts) > columns:
        raise ContextFileError(f"it cannot hold {lengths[:40]} tokens after {seen[:40]} columns")
    return columns, counts


def _check_documents(words: dict[str, str], rows: int) -> tuple[int | None, ...]:
    """The id of each row's last document."""
    ids = words.get("documents", "")
    if _IDS.fullmatch(ids) is None or len(found := json.loads(ids)) != rows:
        raise ContextFileError("it does not say to which documents its rows belong")
    return tuple(found)


def _check_origin(words: dict[str, str], backbone: Any, model: Any, tokenizer: Any) -> None:
    saved, ours = words.get("dtype", "")[:40], _name(backbone.dtype)
    if saved != ours:
        raise ContextFileError(f"it was made by a model in {saved}, this one is in {ours}")
    saved, ours = words.get("model", ""), model_fingerprint(model)
    if saved != ours:
        raise ContextFileError(
            f"it was made by another model (fingerprint {saved[:12]}, this one's is {ours[:12]})"
        )
    if tokenizer is None:
        return
    saved, ours = words.get("tokenizer", ""), tokenizer_fingerprint(tokenizer)
    if saved != ours:
        raise ContextFileError(
            f"it was made with another tokenizer (fingerprint {saved[:12]}, this one's is "
            f"{ours[:12]})"
        )


def _allowed(entry: Entry, dtype: torch.dtype) -> bool:
    """True; ContextFileError for floating-point numbers wider than a model of `dtype` keeps."""
    if entry.dtype.is_floating_point and entry.dtype.itemsize > accumulator_dtype(dtype).itemsize:
        raise ContextFileError(f"{entry.name} is in {_name(entry.dtype)}, the model in {dtype}")
    return True


def _rebuilt(
    backbone: Any, tensors: dict[str, Tensor], words: dict[str, str], lengths: tuple[int, ...]
) -> list[State]:
    """The states, whose tensors may be without data; nothing of the file may be left over."""
    tree = {name[len(STATE) :]: word for name, word in words.items() if name.startswith(STATE)}
    with _told("its states are malformed"):
        states = [restored(name, tensors, tree) for name in state_names(backbone)]
    left = [*tensors, *tree]
    if left:
        raise ContextFileError(f"{left[0][:80]} belongs to no state of the model")
    _check_states(backbone, states, lengths)
    return states


def _filled(
    states: list[State], header: Header, read: Callable[[Entry], Tensor], names: list[str]
) -> list[State]:
    """The same states with the tensors of the file."""
    filled = []
    for name, state in zip(names, states, strict=True):
        tensors: dict[str, Tensor] = {}
        tree: dict[str, str] = {}
        flatten(state, name, tensors, tree)
        tensors = {path: read(header.entries[path]) for path in tensors}
        filled.append(restored(name, tensors, tree))
    return filled


def _check_states(backbone: Any, states: list[Any], lengths: tuple[int, ...]) -> None:
    """Raise ContextFileError unless the states are what so many tokens of each row can leave."""
    names = state_names(backbone)
    for name, block, state in zip(names, backbone.layers, states, strict=False):
        with _told(name):
            block.check_state(state, lengths)
    if backbone.stem.carries:
        with _told("stem"):
            check_like(states[-1], backbone.stem.state_like(len(lengths), torch.float32))


def _check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    if int(ids.amax()) >= vocabulary:
        raise ContextFileError(f"{name} has token ids outside the vocabulary of {vocabulary}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(words: dict[str, str], entries: list[Entry]) -> tuple[LayerSummary, ...]:
    """One line a state, from names and shapes alone."""
    names = [name[len(STATE) :] for name in words if _TOP.fullmatch(name)]
    held: dict[str, list[Entry]] = {name: [] for name in names}
    for entry in entries:
        top = entry.name.split(".")[: 1 + entry.name.startswith("layers.")]
        held.setdefault(".".join(top), []).append(entry)
    return tuple(_layer(name, words, parts) for name, parts in held.items())


def _layer(name: str, words: dict[str, str], entries: list[Entry]) -> LayerSummary:
    counts = {"rows": 0, "tokens": 0}
    for entry in entries:
        found = _KEYS.fullmatch(entry.name)
        if found is not None and len(entry.shape) == 4:
            kind = "rows" if found[1] == "rows.key" else "tokens"
            counts[kind] = max(counts[kind], entry.shape[2])
    return LayerSummary(
        name=name,
        memory=_memory(f"{STATE}{name}.attention", words),
        nbytes=sum(entry.stop - entry.start for entry in entries),
        **counts,
    )


def _memory(path: str, words: dict[str, str]) -> str:
    """The class of a layer's memory without its ending: Full, Window, KVM, OVQ, TimeMix."""
    word = words.get(path, "-")
    for below in (".memory", ".states.0", ".memory"):
        word = words.get(path + below, word)
        path += below if path + below in words else ""
    return word.removesuffix("State").removesuffix("Memory")
