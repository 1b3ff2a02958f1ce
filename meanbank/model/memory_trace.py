"""Most bytes alive at a time while a model's own code runs on shapes alone.

On torch's meta device no tensor has data, so a call of any size takes as long as Python needs to
make it, and what it allocates is known: a new storage counts until nothing holds it any more. What
kernels allocate inside themselves does not count. `scaled_dot_product_attention` is taken to be the
kernel that never holds all scores, wherever PyTorch's CPU has one: heads of keys and values are
equally wide.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def peak_of_shapes(function: Callable[[], Any]) -> int:
    """Most bytes of new tensors of the meta device that are alive at a time within `function`."""
    with _Count() as count, FlashAttention():
        function()
    return count.highest


class _Count(TorchDispatchMode):
    """Adds up the storages that operators make and takes off those that are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.highest = 0
        self.alive: dict[int, weakref.ref] = {}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        old = {id(x.untyped_storage()) for x in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_sparse:
            self.kept += _tensors(args)  # a table's gradient holds on to them, but not on meta
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            if id(storage) not in self.alive and id(storage) not in old:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def freed(_: weakref.ref) -> None:
            self.current -= size
            self.alive.pop(key, None)

        self.alive[key] = weakref.ref(storage, freed)
        self.current += size
        self.highest = max(self.highest, self.current)


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    """Those with a storage among an operator's arguments or results, of which some are lists."""
    for item in items:
        if isinstance(item, Tensor):
            if item.is_meta and not item.is_sparse:
                yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


class FlashAttention(TorchFunctionMode):
    """On the meta device PyTorch would take the kernel that holds all scores.

    `Tensor.backward` leaves the mode: what computes again within it has to enter one of its own.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    if key.shape[-1] != value.shape[-1]:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa
        )
    mask = None
    if attn_mask is not None:  # a mask of booleans becomes one of numbers
        mask = query.new_empty(attn_mask.shape)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask
    )[0]
