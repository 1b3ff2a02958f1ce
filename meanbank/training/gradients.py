"""Gradients of a model, dense or sparse, as the numbers that they hold."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter's gradient by name, where there is one; changing it changes the gradient.

    Sparse gradients are added up row by row first, and stand for themselves with the rows that
    they have (rows, width): those that are missing are zero, so that norms are the dense ones.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found[name] = parameter.grad.values()
        else:
            found[name] = parameter.grad
    return found


def clip(gradients: Iterable[Tensor], largest: float, norm: Tensor) -> None:
    """Scale gradients, whose norm over all is given, to a norm of at most `largest`.

    As `torch.nn.utils.clip_grads_with_norm_`, after which sparse ones would be unsorted again.
    """
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
