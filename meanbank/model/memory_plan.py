"""How many bytes a model needs to read a context and go on from it, or to be trained, before it is.

What stays (weights, tables, the states of all layers) comes from shapes in closed form; what is
only there during a call is counted by `peak_of_shapes`. Nothing is allocated.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from meanbank.core.state import State
from meanbank.model.attention import SoftmaxAttention
from meanbank.model.block import Block
from meanbank.model.cache import MeanbankCache
from meanbank.model.memory_trace import FlashAttention, peak_of_shapes
from meanbank.model.modeling import PREFILL_CHUNK, MeanbankForCausalLM
from meanbank.model.roles import Role, role_of

LONGEST = 2**40  # tokens: where a context fits that is this long, any does
RESOLUTION = 100  # the largest context is found to one part in so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """One layer: its types of memory and values, its parameters, and its state by part."""

    name: str
    memory: str
    values: str
    weights: int
    table: int
    state: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingBytes:
    """Bytes of `batch` sequences of `context` tokens each.

    weights: parameters but for tables over token ids, which are tables. state: what a cache holds
    after exactly so many tokens, by the parts that `cache.describe()` tells apart, but token ids
    apart from exact tokens. prefill, decode: what reading the last piece of a prompt and the last
    single token need at most above all that; the new states, which are made while the old ones are
    still there, are in it.
    """

    context: int
    batch: int
    dtype: str
    weights: int
    tables: int
    state: dict[str, int]
    prefill: int
    decode: int
    layers: tuple[LayerBytes, ...]

    @property
    def total(self) -> int:
        """Most bytes at a time."""
        held = self.weights + self.tables + sum(self.state.values())
        return held + max(self.prefill, self.decode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes of a training step of `batch` sequences of `length` tokens.

    activations: most bytes at a time of the pass forward, with the loss, and of the one back,
    gradients included. optimizer: what it keeps, see `optimizer_nbytes`.
    """

    length: int
    batch: int
    dtype: str
    weights: int
    activations: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.optimizer


def serving_bytes(model: MeanbankForCausalLM, context: int, batch: int = 1) -> ServingBytes:
    """What a model (without data, see `empty_model`) needs in its own dtype."""
    weights, tables = weight_nbytes(model)
    prefill, decode = (nbytes_above(model, context, last, batch) for last in (PREFILL_CHUNK, 1))
    return ServingBytes(
        context=context,
        batch=batch,
        dtype=_name(model.dtype),
        weights=weights,
        tables=tables,
        state=state_by_part(model, context, batch),
        prefill=prefill,
        decode=decode,
        layers=layer_bytes(model, context, batch),
    )


def training_bytes(
    model: MeanbankForCausalLM,
    length: int,
    batch: int,
    optimizer: int = 0,
    *,
    checkpointing: bool = False,
) -> TrainingBytes:
    """What a training step needs; optimizer: what `optimizer_nbytes` counted.

    checkpointing: only what goes into a block is kept, the rest computed again for the pass back.
    """
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    was_training = model.training
    if checkpointing:
        model.train()  # which is when it applies
        model.activation_checkpointing_enable({"context_fn": _first_and_again})

    def step() -> None:
        model(input_ids=ids, targets=ids, use_cache=False).loss.backward()

    try:
        activations = peak_of_shapes(step)
    finally:
        model.zero_grad(set_to_none=True)
        if checkpointing:
            model.activation_checkpointing_disable()
        model.train(was_training)
    return TrainingBytes(
        length=length,
        batch=batch,
        dtype=_name(model.dtype),
        weights=sum(weight_nbytes(model)),
        activations=activations,
        optimizer=optimizer,
    )


def _first_and_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    return contextlib.nullcontext(), FlashAttention()


def optimizer_nbytes(groups: Iterable[dict[str, Any]]) -> int:
    """Bytes of the moments that AdamW (two a parameter) and Muon (one) keep."""
    return sum(
        (2 if "betas" in group else 1) * parameter.numel() * parameter.element_size()
        for group in groups
        for parameter in group["params"]
    )


def weight_nbytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of parameters, and of those that are tables over token ids, which are not in them."""
    weights = tables = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if role_of(name, parameter) is Role.TABLE:
            tables += size
        else:
            weights += size
    return weights, tables


def state_by_part(model: MeanbankForCausalLM, tokens: int, batch: int) -> dict[str, int]:
    """Bytes of a cache after exactly `tokens` tokens of each sequence, by part.

    Layers that give on another's values unchanged (`first_layer`, fixed) are counted as if each
    had its own, as they do from the second call on.
    """
    backbone: Any = model.model
    found: dict[str, int] = {}
    stem = backbone.stem.state_like(batch, model.dtype)
    parts = [] if stem is None else [stem.nbytes_by_part()]
    parts += [_parts(block, tokens, batch, model.dtype) for block in blocks_of(model)]
    for part in parts:
        for name, size in part.items():
            found[name] = found.get(name, 0) + size
    return found


def layer_bytes(model: MeanbankForCausalLM, tokens: int, batch: int) -> tuple[LayerBytes, ...]:
    """Bytes of each layer."""
    layers = []
    for number, (plan, block) in enumerate(
        zip(model.config.plans(), blocks_of(model), strict=True)
    ):
        weights, table = own_nbytes(block, f"model.layers.{number}.")
        layers.append(
            LayerBytes(
                name=f"layers.{number}",
                memory=plan.memory.tag,
                values=plan.values.tag,
                weights=weights,
                table=table,
                state=_parts(block, tokens, batch, model.dtype),
            )
        )
    return tuple(layers)


def empty_cache(model: MeanbankForCausalLM, tokens: int, batch: int) -> MeanbankCache:
    """A cache without data as it is after `tokens` tokens of each sequence."""
    backbone: Any = model.model
    cache = model.model.new_cache()
    if tokens:
        states: list[State] = [b.state_like(tokens, batch, model.dtype) for b in blocks_of(model)]
        stem = backbone.stem.state_like(batch, model.dtype)
        for layer, state in zip(cache.layers, [*states, stem], strict=False):
            layer.store(state, tokens, (tokens,) * batch)
    return cache


def nbytes_of_call(model: MeanbankForCausalLM, seen: int, length: int, batch: int) -> int:
    """Most bytes of states, old and new, and of everything else that a call makes on its way.

    It reads `length` tokens after `seen` and gives the logits of the last.
    """
    cache = empty_cache(model, seen, batch)
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    held = sum(state_by_part(model, seen, batch).values()) if seen else 0
    with torch.no_grad():
        return held + peak_of_shapes(lambda: model(ids, cache=cache, logits_to_keep=1))


def nbytes_above(model: MeanbankForCausalLM, context: int, last: int, batch: int) -> int:
    """Bytes that reading the last tokens of a context needs above the states after it."""
    length = min(context, last)
    held = sum(state_by_part(model, context, batch).values())
    return max(0, nbytes_of_call(model, context - length, length, batch) - held)


def largest_context(model: MeanbankForCausalLM, budget: int, batch: int = 1) -> int | None:
    """Most tokens of each of `batch` sequences whose `total` fits, to one part in 100 from below.

    0 where none does; None where as many as you like do.
    """
    stays = sum(weight_nbytes(model))

    def left(tokens: int, calls: float) -> float:
        """Bytes left with what stays, and so many on top."""
        return budget - stays - sum(state_by_part(model, tokens, batch).values()) - calls

    @functools.cache
    def needed(tokens: int) -> int:
        """Bytes that calls take on top."""
        return max(nbytes_above(model, tokens, last, batch) for last in (PREFILL_CHUNK, 1))

    def fits(tokens: int) -> bool:
        return left(tokens, needed(tokens)) >= 0

    if not fits(1):
        return 0
    if left(LONGEST, 0) >= 0 and fits(LONGEST):
        return None
    # `needed` is dear to know and smooth, the rest is neither: a power law between two contexts
    # tells where both together come to the budget
    low, high = 1, min(LONGEST, _last(lambda tokens: left(tokens, 0), LONGEST) + 1)
    known = [high, _last(functools.partial(left, calls=needed(high)), high)]
    for step in itertools.count(1):
        here = min(max(known[-1], low + 1), high - 1)
        if high - low <= max(1, low // RESOLUTION):
            return low
        low, high = (here, high) if fits(here) else (low, here)
        law = _power_law(needed, known[-2], here)
        guess = _last(lambda tokens, law=law: left(tokens, law(tokens)), high)
        if step % 4 == 0:  # whatever the law says, the ends come nearer
            guess = round((low * high) ** 0.5)
        side = 1 if low > guess * (1 - 1 / RESOLUTION) else -1  # close in from both sides
        known += [here, guess + side * guess // (3 * RESOLUTION)]
    raise AssertionError  # the ends meet


def _power_law(function: Callable[[int], int], first: int, second: int) -> Callable[[int], float]:
    """A power of its argument that meets a function at two numbers."""
    one, two = max(1, function(first)), max(1, function(second))
    power = 0.0 if first == second else math.log(two / one) / math.log(second / first)
    return lambda number: two * (number / second) ** max(0.0, power)


def _last(left: Callable[[int], float], high: int) -> int:
    """The last number below `high` at which a falling function is not negative, else 0."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left(middle) >= 0 else (low, middle)
    return low


def _parts(block: Block, tokens: int, batch: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a block's state, by part; token ids apart."""
    found = block.state_like(tokens, batch, dtype).nbytes_by_part()
    mixer = block.attention
    if isinstance(mixer, SoftmaxAttention) and mixer.values.stores_token_ids:
        exact = mixer.memory.held_after(tokens).exact
        ids = batch * exact * mixer.values.stored_nbytes(dtype)
        found["exact tokens"] -= ids
        found["token ids"] = ids
    return found


def own_nbytes(block: Block, prefix: str) -> tuple[int, int]:
    """Bytes of a block's parameters, and of a table of its own."""
    weights = table = 0
    for name, parameter in block.named_parameters():
        size = parameter.numel() * parameter.element_size()
        if role_of(prefix + name, parameter) is Role.TABLE:
            table += size
        else:
            weights += size
    return weights, table


def blocks_of(model: MeanbankForCausalLM) -> Iterable[Block]:
    """The layers of a model."""
    backbone: Any = model.model
    return cast(Iterable[Block], backbone.layers)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
