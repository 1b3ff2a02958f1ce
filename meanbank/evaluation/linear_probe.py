"""Ridge regression from sums alone: no input is kept, however many there are."""

import torch
from torch import Tensor

RIDGE = 1e-6  # of the mean variance of an input channel: faint traces count, too
ROUNDING = 1e-12  # of the mean square: what channels vary by that do not


def moments(inputs: Tensor, targets: Tensor) -> Tensor:
    """Sums of products of [1, inputs, targets], to be added up over parts of a sample.

    inputs (H, N, D), targets (N, K) -> (H, 1 + D + K, 1 + D + K) in fp64, on the CPU.
    """
    inputs, targets = inputs.double().cpu(), targets.double().cpu()
    heads, count = inputs.shape[:2]
    ones = inputs.new_ones(heads, count, 1)
    rows = torch.cat([ones, inputs, targets.expand(heads, -1, -1)], dim=-1)
    return rows.mT @ rows


def explained(fitted: Tensor, judged: Tensor, inputs: range, target: int) -> Tensor:
    """R^2 of a target, read linearly from some inputs, on other data than it was fitted on.

    fitted, judged: `moments` of two samples; inputs: which of the D; target: which of the K, from
    the end (-1 is the last). Returns (H,): 1 is perfect, 0 the mean of what is judged; below 0 is
    worse than that.
    """
    chosen = fitted.new_tensor([1 + channel for channel in inputs], dtype=torch.long)
    mean = fitted[:, 0] / fitted[:, :1, 0]
    covariance = fitted / fitted[:, :1, :1] - mean[:, :, None] * mean[:, None]
    own = covariance[:, chosen[:, None], chosen]
    ridge = RIDGE * own.diagonal(dim1=1, dim2=2).mean(1)
    ridge += ROUNDING * (mean[:, chosen] ** 2).mean(1) + torch.finfo(own.dtype).tiny
    own = own + ridge[:, None, None] * torch.eye(len(chosen), dtype=own.dtype, device=own.device)
    weights = torch.linalg.solve(own, covariance[:, chosen, target])
    error = torch.zeros_like(mean)  # target - weights * inputs - constant, as a product with a row
    error[:, chosen], error[:, target] = -weights, 1.0
    error[:, 0] = -(error * mean).sum(1)
    squares = (error[:, None] @ judged @ error[:, :, None]).flatten()
    total = judged[:, target, target] - judged[:, 0, target] ** 2 / judged[:, 0, 0]
    return 1 - squares / total
