"""`kvm_attention`: checks its arguments and picks a backend."""

import numbers
from collections.abc import Callable

import torch
from torch import Tensor

from meanbank.core.config import choose
from meanbank.core.precision import accumulator_dtype, without_autocast
from meanbank.ops.checks import check_attention, check_carried, check_per_head, whole_rows
from meanbank.ops.kvm.common import KVMWeights
from meanbank.ops.kvm.fused import kvm_attention_fused
from meanbank.ops.kvm.memory import KVMMemory, KVMUpdate
from meanbank.ops.kvm.options import (
    Append,
    KVMOptions,
    Part,
    ReadKey,
    StoredRotary,
    ValueScale,
    Write,
)
from meanbank.ops.kvm.reference import kvm_attention_reference

BACKENDS = {"fused": kvm_attention_fused, "reference": kvm_attention_reference}


# Up to so many scores (all heads, queries and what they see) autograd through the reference is
# faster than the backward pass of "fused", which computes them anew, and has room for them.
AUTOGRAD_SCORES = 2**24


def check_backend(name: str) -> None:
    """ValueError for a backend that does not exist."""
    choose("backend", name, ["auto", *BACKENDS])


def kvm_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merge_gate: Tensor | None = None,
    *,
    norm_weight: Tensor,
    norm_bias: Tensor,
    state_temperature: Tensor | None = None,
    window_temperature: Tensor | None = None,
    rotary_dim: int,
    chunk_size: int = 256,
    window_chunks: int = 2,
    sink: int = 1,
    budget: Callable[[int], float] | int,
    value_scale: ValueScale = "radius",
    gated_writes: tuple[Write, ...] = ("merge",),
    gated_parts: tuple[Part, ...] = ("key", "value"),
    append: Append = "novelty",
    read_key: ReadKey = "normalized",
    stored_rotary: StoredRotary = "zeroed",
    memory: KVMMemory | None = None,
    return_memory: bool = False,
    trace: list[KVMUpdate] | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, KVMMemory]:
    """Causal attention over an exact recent window and a compressed memory of everything older.

    Key-Value Means (arXiv 2605.09877, section 3). A query sees the last `window_chunks` aligned
    blocks of `chunk_size` tokens exactly, and all memory rows, in one softmax with scale
    `1 / sqrt(Dk)`. When a token arrives after a full window, the oldest block overflows: as many
    tokens as the budget allows, those least like the memory, get rows of their own; the others
    are added, gated, to their most similar row. Similarities that differ by no more than rounding
    noise (2 eps times the norms) are ties, which go to the earlier token and the lower row.
    `append`, `read_key` and `stored_rotary` are controls that the paper does not have.

    >>> query, key, value = torch.randn(3, 1, 4, 1000, 64)  # batch 1, 4 heads, 1000 tokens
    >>> output = kvm_attention(
    ...     query, key, value, norm_weight=torch.ones(64), norm_bias=torch.zeros(64),
    ...     rotary_dim=32, chunk_size=64, budget=lambda seen: 16 * seen**0.5)

    Args:
        query: (B, H, T, Dk), after rotary positions.
        key: (B, Hkv, T, Dk), after rotary positions; Hkv divides H.
        value: (B, Hkv, T, Dv).
        merge_gate: (B, Hkv, T) factor of each token's write, `1 + ELU(x W_g)` of the layer's
            input x; None writes everything with weight 1.
        norm_weight, norm_bias: (Dk,) of LN_s, which prepares, routes and reads memory keys.
        state_temperature, window_temperature: (H,) factors of memory and window keys; None is 1.
        rotary_dim: the first channels of a key, those with rotary positions, see `stored_rotary`;
            0 zeroes nothing. Below Dk; with stored_rotary "kept" at most Dk.
        chunk_size, window_chunks: block length in tokens and blocks in the exact window.
        sink: the first rows that are never merged into; below chunk_size.
        budget: rows wanted after that many tokens seen, rounded down; a number is always that
            many. The memory never shrinks; it starts with the `chunk_size` tokens of the first
            chunk.
        value_scale: how a row's value sum is read: "radius" restores the norm of the value that
            opened the row; "count" divides by the writes to that row; "chunk_count" divides by
            1 + the updates with a merge that the row has lived through (that which appended it
            included), as the authors' ablation did.
        gated_writes: which writes the gate scales, of "initial", "append", "merge".
        gated_parts: which parts of an append or a merge it scales, of "key" and "value"; initial
            rows are scaled whole, as the authors' code does.
        append: which overflowing tokens get rows of their own, always as many as the budget says
            and in the order of their positions: "novelty", those whose best similarity to a row
            is lowest; "random", a fixed draw by position and key/value head (so rows of a batch,
            layers and repeated calls draw alike); "recent", the last of the block; "gate", those
            with the largest merge gate, of ties (16 eps times the largest) the earlier.
        read_key: what queries meet of a row: LN_s of its key sum ("normalized"), or the sum itself
            ("raw"), times the temperature. Novelty and routing use LN_s either way.
        stored_rotary: what happens to the rotary channels of a key before it enters the memory:
            "zeroed", before LN_s, whose affine part then adds to the zeros; "zeroed_again", once
            more after LN_s; "kept", LN_s of the whole rotated key.
        memory: what an earlier call returned, to go on from there; its `seen` says how far it is.
        return_memory: also return the memory after the T tokens.
        trace: a list that collects a `KVMUpdate` for each overflow; only the reference's have
            gradients.
        backend: "fused", "reference" (plain PyTorch, which is the specification) or "auto": fused,
            but the reference for gradients of calls with at most 2^24 scores, where that is faster
            and 64 MiB (fp32) hold them. They agree but for rounding; fused has no second
            derivatives.

    Returns:
        (B, H, T, Dv) in the dtype of `value`, or that and the memory. Sums, gates, norms and
        routing are in fp32 or better whatever the inputs.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together, or an unknown name.
    """
    _check_shapes(query, key, value, merge_gate, norm_weight, norm_bias)
    options = KVMOptions(
        rotary_dim=rotary_dim,
        budget=_as_function(budget),
        chunk_size=chunk_size,
        window_chunks=window_chunks,
        sink=sink,
        value_scale=value_scale,
        gated_writes=gated_writes,
        gated_parts=gated_parts,
        append=append,
        read_key=read_key,
        stored_rotary=stored_rotary,
    )
    _check_settings(options, key, merge_gate)
    if memory is not None:
        _check_memory(memory, key, value, merge_gate, options)
    if merge_gate is not None:
        merge_gate = merge_gate.to(accumulator_dtype(merge_gate.dtype))
    for name, temperature in (
        ("state_temperature", state_temperature),
        ("window_temperature", window_temperature),
    ):
        if temperature is not None:
            check_per_head(name, temperature, query)
    weights = KVMWeights(
        norm_weight,
        norm_bias,
        _ones(query, norm_weight) if state_temperature is None else state_temperature,
        _ones(query, norm_weight) if window_temperature is None else window_temperature,
    )
    check_backend(backend)
    name = backend
    if backend == "auto":
        inputs = (query, key, value, merge_gate, *vars(weights).values())
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        seen = 0 if memory is None else memory.seen
        few = learns and _scores(query, seen, options) <= AUTOGRAD_SCORES
        name = "reference" if few else "fused"
    with without_autocast(query.device):  # routing must not drop to half
        common = torch.promote_types(query.dtype, key.dtype)
        output, new_memory = BACKENDS[name](
            query.to(common), key.to(common), value, merge_gate, weights, options, memory, trace
        )
    return (output, new_memory) if return_memory else output


def _ones(query: Tensor, like: Tensor) -> Tensor:
    return torch.ones(query.shape[1], dtype=like.dtype, device=query.device)


def _scores(query: Tensor, seen: int, options: KVMOptions) -> int:
    """A bound on the scores of a call: of all heads and queries, with all that they can see."""
    total = seen + query.shape[2]
    rows = min(max(options.budget(total), options.chunk_size), total)
    return query[..., 0].numel() * (rows + options.window_chunks * options.chunk_size)


def _check_shapes(query, key, value, merge_gate, norm_weight, norm_bias) -> None:
    check_attention(query, key, value)
    if merge_gate is not None and merge_gate.shape != key.shape[:3]:
        raise ValueError(
            f"merge_gate must have shape {tuple(key.shape[:3])}, got {tuple(merge_gate.shape)}"
        )
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor.shape != key.shape[-1:]:
            raise ValueError(
                f"{name} must have shape ({key.shape[-1]},), got {tuple(tensor.shape)}"
            )


def _check_settings(options: KVMOptions, key: Tensor, gate: Tensor | None) -> None:
    width, rotary_dim = key.shape[-1], options.rotary_dim
    if not 0 <= rotary_dim <= width:
        raise ValueError(f"rotary_dim must be at least 0 and at most {width}, got {rotary_dim}")
    if rotary_dim == width and options.stored_rotary != "kept":
        raise ValueError(
            f"rotary_dim must be below {width} (all channels zeroed would leave nothing to route "
            f"by) unless stored_rotary is kept, got {rotary_dim} and {options.stored_rotary}"
        )
    if options.append == "gate" and gate is None:
        raise ValueError(
            "append gate takes the tokens with the largest merge_gate, and there is none: give "
            "one, or choose novelty, random or recent"
        )


def _check_memory(
    memory: KVMMemory, key: Tensor, value: Tensor, gate: Tensor | None, options: KVMOptions
) -> None:
    chunks = -(-memory.seen // options.chunk_size)
    start = max(0, (chunks - options.window_chunks) * options.chunk_size)
    settings = f"chunk_size {options.chunk_size} and window_chunks {options.window_chunks}"
    check_carried(memory, memory.seen - start, settings, key, value)
    if (memory.window_gate is None) != (gate is None):
        raise ValueError("merge_gate must be given either always or never for one memory")


def _as_function(budget: Callable[[int], float] | int) -> Callable[[int], int]:
    if callable(budget):
        return lambda seen: whole_rows(budget(seen), seen)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Integral) or budget < 1:
        raise ValueError(f"budget must be a function or a positive number of rows, got {budget!r}")
    rows = int(budget)
    return lambda seen: rows
