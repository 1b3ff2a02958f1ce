"""One generated token after another, through the states of many layers in turn.

A layer's state may fit a cache, and memories update once a chunk. So decoding goes round `layers`
states, each of which stands at another place of the chunk: one round trip of chunk_size steps meets
every place of a chunk, and one update, exactly once. That is the mean over chunk_size consecutive
tokens of one layer, with states that the caches have forgotten.
"""

import abc
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from meanbank.benchmarks.full_decode import FullCache, fastest_layouts
from meanbank.benchmarks.operands import Operands, flash, kvm
from meanbank.benchmarks.settings import Machine, Sizes
from meanbank.benchmarks.timing import Arm
from meanbank.core.state import State


def offsets(chunk: int, layers: int) -> list[int]:
    """Where in a chunk each layer begins."""
    return [layer * chunk // layers for layer in range(layers)]


def order(chunk: int, layers: int) -> list[tuple[int, int]]:
    """(layer, tokens since the context's end) of each of the chunk's steps, in turns."""
    bounds = [*offsets(chunk, layers), chunk]
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    return [
        (layer, bounds[layer] + turn)
        for turn in range(max(counts))
        for layer in range(layers)
        if turn < counts[layer]
    ]


@dataclasses.dataclass
class Decoder(abc.ABC):
    """A way of decoding: the states of all layers after a context, and one step.

    nbytes: what one layer's state holds right after the context.
    """

    nbytes: int = dataclasses.field(init=False, default=0)

    @abc.abstractmethod
    def start(self) -> list[Any]:
        """The layers' states at their offsets; what an earlier round did is forgotten."""

    @abc.abstractmethod
    def step(self, state: Any, layer: int, token: int) -> tuple[Tensor, Any]:
        """Output (B, H, 1, D) of that token after the context, and the new state."""


def decode_arm(decoder: Decoder, sizes: Sizes) -> Arm:
    """The arm whose step is one token in one layer.

    Each layer's first token comes before the clock starts: a state is then one that decoding left.
    """
    steps = order(sizes.chunk_size, sizes.layers)

    @torch.inference_mode()
    def prepare() -> list[Any]:
        states = decoder.start()
        for layer, token in enumerate(offsets(sizes.chunk_size, sizes.layers)):
            _, states[layer] = decoder.step(states[layer], layer, token)
        return states

    @torch.inference_mode()
    def run(states: list[Any]) -> None:
        for layer, token in steps:
            _, states[layer] = decoder.step(states[layer], layer, token + 1)

    return Arm(run=run, prepare=prepare, steps=len(steps))


class KVMDecoder(Decoder):
    """A `KVMMemory` carried from call to call through `kvm_attention`."""

    @torch.inference_mode()
    def __init__(
        self, operands: Operands, context: int, sizes: Sizes, budget: str, backend: str
    ) -> None:
        """operands: of the context and at least chunk_size + 1 further tokens."""
        self.sizes, self.budget, self.backend = sizes, budget, backend
        self.tokens = operands.tokens(context, context + sizes.chunk_size + 1)
        _, memory = kvm(operands.part(0, context), sizes, budget, backend)
        self.nbytes = memory.nbytes()
        self.states: list[State] = []
        for offset in offsets(sizes.chunk_size, sizes.layers):
            if offset:
                further = operands.part(context, context + offset)
                _, state = kvm(further, sizes, budget, backend, memory)
            else:
                state = memory
            self.states.append(state.map(torch.clone))

    def start(self) -> list[Any]:
        return list(self.states)

    def step(self, state: Any, layer: int, token: int) -> tuple[Tensor, Any]:
        return kvm(self.tokens[token], self.sizes, self.budget, self.backend, state)


class SDPADecoder(Decoder):
    """`scaled_dot_product_attention` on a preallocated cache, as a user would call it."""

    @torch.inference_mode()
    def __init__(self, operands: Operands, context: int, sizes: Sizes) -> None:
        self.context = context
        self.tokens = operands.tokens(context, context + sizes.chunk_size + 1)
        self.caches = [(operands.key.clone(), operands.value.clone()) for _ in range(sizes.layers)]
        shown = operands.part(0, context)
        self.nbytes = 2 * shown.key.numel() * shown.key.element_size()

    def start(self) -> list[Any]:
        return list(self.caches)

    def step(self, state: Any, layer: int, token: int) -> tuple[Tensor, Any]:
        key, value = state
        new, at = self.tokens[token], self.context + token
        key[:, :, at], value[:, :, at] = new.key[:, :, 0], new.value[:, :, 0]
        with flash(new.query):
            output = torch.nn.functional.scaled_dot_product_attention(
                new.query, key[:, :, : at + 1], value[:, :, : at + 1]
            )
        return output, state


class FullDecoder(Decoder):
    """The best full attention in plain PyTorch, in the layouts that are fastest here."""

    @torch.inference_mode()
    def __init__(self, operands: Operands, context: int, sizes: Sizes, machine: Machine) -> None:
        self.context = context
        self.tokens = operands.tokens(context, context + sizes.chunk_size + 1)
        key, value = operands.key.flatten(0, 1), operands.value.flatten(0, 1)
        self.layouts = fastest_layouts(
            key[:, :context], value[:, :context], synchronize=machine.synchronize
        )
        capacity = key.shape[1]
        self.caches = [FullCache(key, value, capacity, self.layouts) for _ in range(sizes.layers)]
        shown = operands.part(0, context)
        self.nbytes = 2 * shown.key.numel() * shown.key.element_size()

    def start(self) -> list[Any]:
        return list(self.caches)

    def step(self, state: Any, layer: int, token: int) -> tuple[Tensor, Any]:
        new = self.tokens[token]
        query, key, value = (x.flatten(0, 1)[:, 0] for x in (new.query, new.key, new.value))
        output = state.step(query, key, value, self.context + token)
        return output.view_as(new.query), state


def decoder_of(
    operands: Operands, context: int, sizes: Sizes, machine: Machine, arm: str, budget: str | None
) -> Decoder:
    """The decoder of an arm; a budget for those that have one."""
    if arm == "sdpa":
        return SDPADecoder(operands, context, sizes)
    if arm == "full":
        return FullDecoder(operands, context, sizes, machine)
    assert budget is not None
    return KVMDecoder(operands, context, sizes, budget, "auto" if arm == "ours" else arm)
