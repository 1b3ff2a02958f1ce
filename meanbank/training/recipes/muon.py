"""Muon for matrices that may be divided over ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

SETTINGS = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")  # of what is orthogonalised


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, which makes whole again what is divided over ranks.

    Newton-Schulz steps need a whole matrix. Of a `DTensor`, momentum and weight have the rows of
    this rank, but each update is gathered, orthogonalised on every rank and divided again, so
    that it is the one of a single process. State and groups are those of `torch.optim.Muon`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        assert closure is None
        divided = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor) and parameter.grad is not None
        ]
        gradients = [parameter.grad for parameter, _ in divided]
        for parameter, group in divided:
            self._update(parameter, group)
            parameter.grad = None  # not again, below
        super().step()
        for (parameter, _), gradient in zip(divided, gradients, strict=True):
            parameter.grad = gradient

    def _update(self, parameter: DTensor, group: dict[str, Any]) -> None:
        gradient: Any = parameter.grad
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average, momentum = state["momentum_buffer"], group["momentum"]
        average.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(average, momentum) if group["nesterov"] else average
        change = _orthogonalised(update.full_tensor(), group)
        change = distribute_tensor(
            change, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(change, alpha=group["lr"])


def _orthogonalised(update: Tensor, group: dict[str, Any]) -> Tensor:
    """What `torch.optim.Muon` adds to a matrix for this update, at a learning rate of 1."""
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    settings = {name: group[name] for name in SETTINGS}
    plain: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    torch.optim.Muon([matrix], **plain, **settings).step()
    return matrix.detach()
