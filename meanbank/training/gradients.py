"""Gradients of a model, dense or sparse, as the numbers that they hold."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meanbank.training.ranks import Ranks
from meanbank.training.sharding import here


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter's gradient by name, where there is one; changing it changes the gradient.

    Sparse gradients are added up row by row first, and stand for themselves with the rows that
    they have (rows, width): those that are missing are zero, so that norms are the dense ones.
    Of gradients that are divided over ranks, it is what is here.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found[name] = parameter.grad.values()
        else:
            found[name] = here(parameter.grad)
    return found


def norm_of(model: nn.Module, numbers: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """The norm over all gradients of a model, whose numbers here `numbers_of` has found."""
    if ranks.alone:
        return torch.nn.utils.get_total_norm(numbers.values())
    divided = {n for n, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    ours, common = (
        torch.nn.utils.get_total_norm([numbers[name] for name in names]).double()
        for names in (numbers.keys() & divided, numbers.keys() - divided)
    )
    (squares,) = ranks.sum(ours.item() ** 2)
    return torch.sqrt(squares + common**2)


def clip(gradients: Iterable[Tensor], largest: float, norm: Tensor) -> None:
    """Scale gradients, whose norm over all is given, to a norm of at most `largest`.

    As `torch.nn.utils.clip_grads_with_norm_`, after which sparse ones would be unsorted again.
    """
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
