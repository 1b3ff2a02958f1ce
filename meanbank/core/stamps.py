"""Stamps: whether a tensor still has the numbers that it had."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0  # of all optimizers of the process


class Stamp:
    """Equal to an earlier stamp of the same numbers, where nothing was written to them since.

    It keeps no memory, and does not take another tensor for one that was freed, whatever its
    address. After a step of any optimizer no older stamp is equal: fused ones write uncounted. So
    do writes through `.data`, and to tensors of inference mode; those are not noticed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        version = None if tensor.is_inference() else tensor._version
        self._writes = version, _steps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp) and vars(self) == vars(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> Any:
        return object, ()  # copies equal nothing: they are of a process or a tensor of their own


def _count_step(*_: Any) -> None:
    global _steps  # noqa: PLW0603
    _steps += 1


register_optimizer_step_post_hook(_count_step)
