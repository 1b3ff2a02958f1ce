"""What a backbone is: everything around the two axes that makes a model GPTAlpha-2 or nanochat."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.conventions import Conventions
from meanbank.core.flops import Flops
from meanbank.core.layout import Layout
from meanbank.model.layers import Address


class Stem(nn.Module, abc.ABC):
    """From embedded tokens to x0, the start of the residual stream.

    carries: whether it has a state to go on from.
    """

    carries: ClassVar[bool] = False

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    @abc.abstractmethod
    def forward(self, embedded: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """embedded (B, T, hidden_size) -> x0 (B, T, hidden_size), and the state after T tokens."""

    @abc.abstractmethod
    def alone(self, embedded: Tensor) -> Tensor:
        """x0 of tokens without a predecessor: (N, hidden_size) -> (N, hidden_size)."""

    def initialize(self) -> None:
        """Start values."""

    def flops(self, tokens: int) -> Flops:
        """FLOPs of `tokens` tokens; the norm of an embedding has none."""
        return Flops()

    def state_like(self, batch: int, dtype: torch.dtype) -> Any:
        """What it carries on after some token of `batch` rows, without data."""
        return None

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, undo: int = 0) -> int:
        """A bound on the bytes that its state holds within the first `tokens` tokens, where `undo`
        of them can be forgotten."""
        return 0


def default_linear(weight: Tensor) -> None:
    """PyTorch's own start of a linear map: U(+-1 / sqrt(d_in))."""
    bound = weight.shape[1] ** -0.5
    init.uniform_(weight, -bound, bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartValues:
    """How weights start; each function fills a weight in place, unless it was loaded.

    embedding, head: the token embedding and the output head (vocabulary, hidden_size).
    matrix: every other matrix, unless its module says otherwise.
    mlp_up, output: the MLP's first matrix, and the maps back to the residual stream.
    """

    embedding: Callable[[Tensor], Any]
    matrix: Callable[[Tensor], Any]
    mlp_up: Callable[[Tensor], Any]
    output: Callable[[Tensor], Any]
    head: Callable[[Tensor], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """One backbone.

    conventions: what its layers do where a plan leaves a setting open.
    residual_scale: factor of every residual branch, given the number of layers.
    mlp_token_shift: whether the MLP's input is shifted.
    logit_softcap: logits are `c tanh(z / c)`, in fp32 or better; None leaves them.
    norm: makes a norm of the residual stream, given its width.
    """

    conventions: Conventions
    residual_scale: Callable[[int], float]
    mlp_token_shift: bool
    logit_softcap: float | None
    norm: Callable[[int], nn.Module]
    address: type[Address]
    stem: type[Stem]
    start_values: StartValues
