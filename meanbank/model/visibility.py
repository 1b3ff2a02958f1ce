"""Who sees what: in which form each query of a layer sees each past token."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.config import to_plain
from meanbank.core.geometry import Geometry
from meanbank.core.layout import Span
from meanbank.core.record import Record
from meanbank.core.values import DenseValues
from meanbank.memory import KVM, RWKV7, Memory, MemoryConfig
from meanbank.memory.operator import OperatorState, unmarked
from meanbank.model.config import MeanbankConfig
from meanbank.ops.rwkv7 import rwkv7_recurrence

FORMS = ("later", "not seen", "exact", "sink", "own row", "shared row", "matrix")
LATER, NOT_SEEN, EXACT, SINK, OWN_ROW, SHARED_ROW, MATRIX = range(len(FORMS))
FEWEST, MOST = 48, 1024  # tokens that are shown unless told otherwise
LIMIT = 4096  # tokens: what is told of them are squares
LONG = 1 << 20  # tokens: what is exact for so long is exact without end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """What the queries of some layers with equal memories see.

    layers: their numbers; memory: its type and the settings that are not its defaults.
    forms: (T, T) int8, the index in `FORMS` of how query i sees token j: "later" ones come after
        it; "exact" as they are; "sink" exactly though the window has passed them, or in a row that
        nothing is merged into; "own row" and "shared row" of the compressed memory, that holds this
        token alone or others too by then; "matrix", through a state that holds no tokens.
    """

    layers: tuple[int, ...]
    memory: str
    forms: np.ndarray


def visibility(
    config: MeanbankConfig, tokens: int | None = None, layer: int | None = None
) -> list[Visibility]:
    """One entry for each distinct memory of a plan, in the order of layers.

    Found by running the memories on random queries and keys, with values that tell tokens apart.
    tokens: how many; by default three of the longest exact windows, within 48 and 1024;
    at most 4096. layer: only the memory of that one. Raises ValueError for a layer that there is
    not.
    """
    plans = config.plans()
    if layer is not None and not 0 <= layer < len(plans):
        raise ValueError(f"there is no layer {layer}: the model has {len(plans)}")
    if tokens is not None and not 1 <= tokens <= LIMIT:
        raise ValueError(f"tokens must be from 1 to {LIMIT}, got {tokens}")
    kinds: dict[str, list[int]] = {}
    for number, plan in enumerate(plans):
        kinds.setdefault(f"{plan.memory}", []).append(number)
    chosen = [layers for layers in kinds.values() if layer is None or layer in layers]
    memories = [plans[layers[0]].memory for layers in chosen]
    sizes = [config.geometry(plans[layers[0]]) for layers in chosen]
    if tokens is None:
        windows = [_window(memory, size) for memory, size in zip(memories, sizes, strict=True)]
        tokens = min(MOST, max(FEWEST, 3 * max(windows)))
    return [
        Visibility(
            layers=tuple(layers),
            memory=described(memory),
            forms=forms_seen(memory, size, tokens),
        )
        for layers, memory, size in zip(chosen, memories, sizes, strict=True)
    ]


def described(memory: MemoryConfig) -> str:
    """A memory's type and the settings that are not its defaults: `kvm, chunk_size 8`."""
    return ", ".join([memory.tag, *_changes(to_plain(memory), to_plain(type(memory)()))])


def _changes(given: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    """Settings that differ; of a choice that differs all that are not 0 or null."""
    changes = []
    for name, value in given.items():
        if isinstance(value, dict):
            alike = value.get("type") == usual[name].get("type")
            inner = {key: item for key, item in value.items() if key != "type"}
            changes += [] if alike else [f"{name} {value.get('type')}"]
            changes += _changes(inner, usual[name] if alike else dict.fromkeys(inner, 0))
        elif value is not None and value != usual[name]:
            words = value if isinstance(value, list) else [value]
            shown = (f"{word:g}" if isinstance(word, float) else f"{word}" for word in words)
            changes.append(" ".join([name, *shown]))
    return changes


@torch.no_grad()
def forms_seen(config: MemoryConfig, geometry: Geometry, tokens: int) -> np.ndarray:
    """The forms (T, T) in which queries of one head see tokens, see `Visibility.forms`."""
    small = dataclasses.replace(
        geometry, hidden_size=16, num_heads=1, num_kv_heads=1, value_dim=tokens
    )
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    forms = torch.full((tokens, tokens), NOT_SEEN, dtype=torch.int8)
    if isinstance(config, RWKV7):
        forms[_weights_of_matrix(small) != 0] = MATRIX
        return forms.masked_fill(later, LATER).numpy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        memory = config.build(small).double()
        memory.initialize()
        query, key = torch.randn(2, 1, 1, tokens, small.key_dim, dtype=torch.float64)
        gate_input = torch.randn(1, tokens, small.hidden_size, dtype=torch.float64)
    span = Span(0, tokens, record=Record(provenance=True))
    output, state = memory(query, key, DenseValues(_one_hot(tokens)), gate_input, None, span)
    forms[output[0, 0] != 0] = EXACT
    if isinstance(state, OperatorState) and state.destination is not None:
        sink = config.sink if isinstance(config, KVM) else 0
        _mark_rows(forms, memory, unmarked(state.destination[0, 0])[0], sink)
    else:
        _mark_sink(forms)
    return forms.masked_fill(later, LATER).numpy()


def _one_hot(tokens: int) -> Tensor:
    """Values (1, 1, T, T) with which the outputs of attention are its weights.

    Merged rows stay sums of their tokens' values, whatever brings them back to scale.
    """
    return torch.eye(tokens, dtype=torch.float64)[None, None]


def _mark_rows(forms: Tensor, memory: Memory, row_of: Tensor, sink: int) -> None:
    """Tell tokens in rows, of the memory at the time of each query, from exact ones.

    row_of: (S,) the row of each token that has left the window by the end.
    """
    for query in range(len(forms)):
        older = memory.held_after(query + 1).older
        rows = row_of[:older].long()
        shared = torch.bincount(rows)[rows] > 1 if older else rows.bool()
        form = torch.where(shared, SHARED_ROW, OWN_ROW).masked_fill(rows < sink, SINK)
        seen = forms[query, :older]
        forms[query, :older] = torch.where(seen == EXACT, form.to(forms.dtype), seen)


def _mark_sink(forms: Tensor) -> None:
    """Exact tokens with a gap between them and the query are the sink."""
    for query, row in enumerate(forms):
        hidden = (row[: query + 1] == NOT_SEEN).nonzero()
        if len(hidden):
            before = row[: int(hidden[-1])]
            before[before == EXACT] = SINK


def _weights_of_matrix(geometry: Geometry) -> Tensor:
    """How much each token is in what RWKV-7's recurrence reads: (T, T), of both signs."""
    tokens = geometry.value_dim
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, tokens, geometry.key_dim)

    def draw(make: Any) -> Tensor:
        return make(shape, generator=generator, dtype=torch.float64)

    removal = F.normalize(draw(torch.randn), dim=-1)
    output, _ = rwkv7_recurrence(
        draw(torch.randn),
        -math.exp(-0.5) * draw(torch.rand),
        draw(torch.randn),
        _one_hot(tokens),
        removal,
        draw(torch.rand),
    )
    return output[0, 0]


def _window(config: MemoryConfig, geometry: Geometry) -> int:
    """Tokens that it holds exactly, at most; 0 for all of them or none."""
    if not config.has_address:
        return 0
    with torch.device("meta"):
        exact = config.build(geometry).held_max(LONG).exact
    return 0 if exact >= LONG else exact
