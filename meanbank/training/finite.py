"""Numbers that are not finite, and where they come from."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class NonFiniteError(ValueError):
    """A loss, a gradient or a weight is not finite; training stops before it spreads."""


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of a tensor is."""
    return bool(torch.isfinite(tensor).all())


def non_finite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of those with a number that is not finite."""
    return [name for name, tensor in tensors if not is_finite(tensor)]


@torch.no_grad()
def locate_non_finite(model: nn.Module, run: Callable[[], object]) -> str:
    """Name of the first module, in order of execution, whose output in `run` is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable:
        def hook(module, inputs, output) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            bad = any(isinstance(part, Tensor) and not is_finite(part) for part in parts)
            if bad and not found:
                found.append(name)

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss itself"
