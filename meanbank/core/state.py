"""State: what a layer carries from one call to the next, as a tree of tensors."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor


class State:
    """Base of frozen dataclasses that hold tensors (batch first), other states, and plain data.

    The operations below are all a cache needs, so they are written here once and no memory has to
    repeat them. They return new states; nothing is changed in place.
    """

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor of the tree."""
        return _map(self, function)

    def select(self, rows: Tensor) -> Self:
        """Keep the batch rows `rows` (R,), in that order."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def repeat(self, times: int) -> Self:
        """Repeat every batch row `times` times, copies next to each other."""
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the tree, in field order."""
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(collect)
        return iter(found)

    def nbytes(self) -> int:
        """Bytes held, without spare storage behind views (states never keep such views)."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def _map(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(node, Tensor):
        return function(node)
    if isinstance(node, State):
        instance: Any = node
        fields = dataclasses.fields(instance)
        changed = {f.name: _map(getattr(node, f.name), function) for f in fields}
        return dataclasses.replace(instance, **changed)
    if isinstance(node, tuple):
        return tuple(_map(item, function) for item in node)
    return node
