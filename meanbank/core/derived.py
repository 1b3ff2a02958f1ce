"""Derived: what is computed from a state once and read many times, such as normalised rows.

It accompanies a state and is not part of it. A state never changes, so what is derived from it
holds as long as the weights that it also depends on do; every operation that makes another state
(crop, select, save, copy ...) leaves it behind, and whoever needs it makes it anew.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meanbank.core.stamps import Stamp

NAME = "_derived"  # of the attribute of a state, which is no field
T = TypeVar("T", bound=Tensor | tuple[Tensor, ...])


def derived(owner: Any, key: Hashable, weights: Sequence[Tensor], make: Callable[[], T]) -> T:
    """What `make` gives, or gave before for this very owner, the same key and the same weights.

    Weights are the same as far as `Stamp` can tell: what is written through `.data` is not noticed.
    Nothing is kept where gradients are recorded.
    """
    if torch.is_grad_enabled():
        return make()
    kept = vars(owner).get(NAME)
    if kept is not None and kept[0] == key and kept[1] == [*map(Stamp, weights)]:
        return kept[2]
    value = make()
    keep(owner, key, weights, value)
    return value


def keep(owner: Any, key: Hashable, weights: Sequence[Tensor], value: Any) -> None:
    """Let `derived` give `value` from now on."""
    if torch.is_grad_enabled() or any(weight.is_inference() for weight in weights):
        return  # writes to tensors of inference mode are not counted
    vars(owner)[NAME] = (key, [*map(Stamp, weights)], value)


def derived_tensors(owner: Any) -> Iterator[Tensor]:
    """The tensors that accompany one state."""
    kept = vars(owner).get(NAME)
    if kept is not None:
        yield from (kept[2],) if isinstance(kept[2], Tensor) else kept[2]
