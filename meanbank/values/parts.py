"""Parts of a layer's values: what a coefficient or a gate scales, and how it can be left out."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Part(abc.ABC):
    """A summand of a layer's values.

    name: what it is; owner: the module that has what scales it, under the name `attribute`;
    table: the table over token ids that it is looked up in, if any.
    """

    name: str
    owner: nn.Module
    attribute: str
    table: Table | None = None

    @property
    @abc.abstractmethod
    def coefficient(self) -> float | None:
        """The number that scales it, the mean over heads where each has one; None for a gate."""

    @abc.abstractmethod
    def left_out(self) -> contextlib.AbstractContextManager[None]:
        """Within it the part is zero; afterwards all is as it was, bit for bit."""


class Scaled(Part):
    """A part that a parameter or a number scales."""

    @property
    def coefficient(self) -> float:
        scale = getattr(self.owner, self.attribute)
        return scale.detach().double().mean().item() if isinstance(scale, Tensor) else scale

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        scale = getattr(self.owner, self.attribute)
        nothing: Any = 0.0
        if isinstance(scale, nn.Parameter):
            nothing = nn.Parameter(torch.zeros_like(scale), requires_grad=scale.requires_grad)
        setattr(self.owner, self.attribute, nothing)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, scale)


class Gated(Part):
    """A part that the sigmoid of a module's output scales."""

    @property
    def coefficient(self) -> None:
        return None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        gate = getattr(self.owner, self.attribute)
        closed = gate.register_forward_hook(lambda *call: torch.full_like(call[-1], -torch.inf))
        try:
            yield
        finally:
            closed.remove()
