"""The loss of a language model from its hidden states, without the logits of all tokens at a time.

With 50,304 tokens in the vocabulary, logits of 8,192 tokens take 1.6 GB in fp32, and autograd wants
that several times: in long contexts more than all layers that keep their inputs alone. PyTorch's
own `linear_cross_entropy` knows no softcap and does not tell the loss of each token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meanbank.core.config import choose
from meanbank.core.conventions import IGNORED
from meanbank.core.precision import accumulator_dtype, without_autocast

BACKENDS = ("pieces", "reference")
# Bytes of a piece's logits and its least tokens. On a CPU the former stay in a core's cache; with
# fewer tokens, adding to the gradient of the weight would take longer than its product. Those of a
# GPU are not measured.
PIECE = {"cpu": (2**21, 256), "other": (2**28, 1024)}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | None = None,
    backend: str = "pieces",
) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of the logits `hidden weight^T`, in fp32 or better.

    Args:
        hidden: (N, D).
        weight: (V, D). Under autocast the products are in its dtype.
        targets: (N,) int64 token ids; -100 counts nothing.
        softcap: logits z become `softcap tanh(z / softcap)`.
        backend: "pieces" goes through a few tokens at a time and computes the gradients along with
            the loss, where they are wanted: it has no second derivatives, and needs room for
            gradients of hidden and weight besides one piece's logits. "reference" is plain PyTorch.

    Returns:
        The sum over the tokens, and the loss of each, (N,), without gradient; 0 where ignored.
    """
    if choose("backend", backend, BACKENDS) == "reference":
        logits = F.linear(hidden, weight)
        if softcap is not None:
            logits = softcap * torch.tanh(logits.to(accumulator_dtype(logits.dtype)) / softcap)
        return cross_entropy(logits, targets)
    learns = torch.is_grad_enabled()  # within a Function its inputs seem to need gradients anyway
    total, losses = _InPieces.apply(hidden, weight, targets, softcap, learns)  # type: ignore[misc]
    return total, losses


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What `linear_cross_entropy` gives, of logits (N, V)."""
    precise = logits.to(accumulator_dtype(logits.dtype))
    losses = F.cross_entropy(precise, targets, ignore_index=IGNORED, reduction="none")
    return losses.sum(), losses.detach()


def tokens_at_once(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of a piece."""
    nbytes, least = PIECE["cpu" if device.type in ("cpu", "meta") else "other"]
    return max(least, nbytes // (vocabulary * dtype.itemsize))


class _InPieces(torch.autograd.Function):
    """The loss with the gradients of its sum, which backward has only to scale."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        device, dtype = hidden.device, torch.promote_types(hidden.dtype, weight.dtype)
        autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
        if autocast and dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device.type)
        precise = accumulator_dtype(dtype)
        for_hidden, for_weight = (learns and needed for needed in ctx.needs_input_grad[:2])
        wanted = for_hidden or for_weight
        losses = hidden.new_empty(len(hidden), dtype=precise)
        hidden_gradient = torch.empty_like(hidden) if for_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=precise) if for_weight else None
        with without_autocast(device):
            read, weights = hidden.to(dtype), weight.to(dtype)
            step = tokens_at_once(len(weight), precise, device)
            for start in range(0, len(hidden), step):
                part = slice(start, start + step)
                losses[part], gradient = _piece(
                    (read[part] @ weights.mT).to(precise), targets[part], softcap, wanted
                )
                gradient = gradient.to(dtype)
                if hidden_gradient is not None:
                    hidden_gradient[part] = gradient @ weights
                if weight_gradient is None:
                    continue
                if dtype == precise:
                    weight_gradient.addmm_(gradient.mT, read[part])
                else:
                    weight_gradient += gradient.mT @ read[part]
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (each if each is None else each * slope for each in ctx.saved_tensors)
        return *gradients, None, None, None


def _piece(
    logits: Tensor, targets: Tensor, softcap: float | None, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Losses (n,) of logits (n, V), which are overwritten, and the gradient of their sum."""
    slope = None
    if softcap is not None:
        slope = logits.div_(softcap).tanh_()
        logits = slope * softcap
    ignored = targets[:, None] == IGNORED
    index = targets[:, None].masked_fill(ignored, 0)
    right, top = logits.gather(1, index), logits.amax(dim=-1, keepdim=True)
    chances = logits.sub_(top).exp_()
    total = chances.sum(dim=-1, keepdim=True)
    losses = (total.log() + (top - right)).masked_fill_(ignored, 0)[:, 0]
    if not wanted:
        return losses, chances
    gradient = chances.div_(total)
    gradient.scatter_add_(1, index, gradient.new_full((1, 1), -1).expand_as(index))
    gradient.masked_fill_(ignored, 0)
    if slope is not None:
        gradient.addcmul_(gradient, slope.square_(), value=-1)
    return losses, gradient
