"""Start values of a whole model.

A `StartValues` says how matrices start; modules with other needs fill their own parameters after
that. Every function of `init` leaves a parameter alone that was loaded from a file.

Each module draws random numbers of its own, by its name: with one seed, models that differ in a
part start alike in all others, so that what is compared is that part.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.model.backbone import StartValues, Stem, default_linear
from meanbank.model.block import Block

# A start without the zeros of the papers, for models of a layer or two.
PLAIN = StartValues(
    embedding=lambda weight: init.normal_(weight, std=0.02),
    matrix=default_linear,
    mlp_up=lambda weight: None,
    output=lambda weight: None,
    head=lambda weight: init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5),
)


def initialize_backbone(
    start: StartValues,
    embedding: nn.Embedding,
    stem: Stem,
    blocks: Sequence[Block],
    final_norm: nn.Module,
    shared_table: nn.Parameter | None,
    seed: int | None,
) -> None:
    """Embedding, norms and blocks; tables last, from the final start values of the embedding."""
    draws = Draws(seed, embedding.weight.device)
    with draws.of("embedding"):
        start.embedding(embedding.weight)
    layers = [(f"layers.{layer}", block) for layer, block in enumerate(blocks)]
    for place, part in (("stem", stem), *layers, ("norm", final_norm)):
        for name, module in part.named_modules():
            if isinstance(module, nn.Linear):
                with draws.of(f"{place}.{name}"):
                    start.matrix(module.weight)
            elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
                init.ones_(module.weight)
                init.zeros_(module.bias)
    with draws.of("stem"):
        stem.initialize()
    for layer, (place, block) in enumerate(layers):
        ratio = 1 - layer / len(blocks)
        with draws.of(f"{place}.attention"):
            block.attention.initialize(ratio)
        with draws.of(f"{place}.mlp"):
            block.mlp.initialize(ratio)
            start.mlp_up(block.mlp.up.weight)
            start.output(block.mlp.down.weight)
        with draws.of(f"{place}.output"):
            start.output(block.attention.output_projection.weight)

    def x0() -> Tensor:
        return stem.alone(embedding.weight)

    def draw(*shape: int) -> Tensor:
        weight = torch.empty(*shape, device=embedding.weight.device)
        start.matrix(weight)
        return weight

    first = next((block for block in blocks if block.reads_shared_table), None)
    for place, block in layers:
        # numbers of the projection in whose place the table is
        with draws.of(f"{place}.attention.values.projection"):
            block.initialize_table(x0, draw, shared_table if block is first else None)


def start_seed() -> int | None:
    """A seed for `Draws` from PyTorch's generator; None on the meta device, which draws nothing."""
    if torch.get_default_device().type == "meta":
        return None
    return int(torch.randint(2**62, (), device="cpu"))


class Draws:
    """Random numbers by name, for weights on a device."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._nothing = device.type == "meta"
        self._seed = start_seed() if seed is None and not self._nothing else seed
        self._cuda = [device] if device.type == "cuda" else []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Within it, what is drawn depends on seed and name alone; outside nothing changes.

        The contextual part of a mixture is the projection that the layer would have without it.
        """
        if self._nothing:
            yield
            return
        name = name.replace(".values.contextual.", ".values.")
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
        with torch.random.fork_rng(self._cuda):
            torch.default_generator.manual_seed(seed)
            for device in self._cuda:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield
