"""A device that is none: its tensors are numbers in main memory, but do not mix with the CPU's.

It finds where tensors of two devices meet and where the host waits for a device; kernels it has
none of its own. Made for a process by itself: PyTorch keeps the device for good.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "emulated"
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # by either's
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}


def is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


class There(Tensor):
    """A tensor of the device; `numbers` are the CPU's."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "There":
        there = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME, 0),
        )
        there.numbers = numbers
        return there

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Emulation.current.run(func, args, kwargs or {})


def _on_the_cpu(x: Any) -> Any:
    if isinstance(x, There):
        return x.numbers
    return torch.device("cpu") if isinstance(x, torch.device) and is_there(x) else x


class _Made(TorchFunctionMode):
    """What PyTorch does by ways that no dispatch sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], There):
            return args[0].cpu().tolist()
        if func in (torch.tensor, torch.as_tensor) and is_there(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs, device="cpu").to(device)
        return func(*args, **kwargs)


class Emulation(TorchDispatchMode):
    """Within it there is the device. waits: how often the host has waited for it."""

    current: "Emulation"
    waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        there = [x for x in tensors if isinstance(x, There)]
        here = [x for x in tensors if not isinstance(x, There) and x.ndim]
        if func.overloadpacket in INDEXED and isinstance(args[0], There):
            here = [x for x in args[2:] if isinstance(x, Tensor) and not isinstance(x, There)]
        if there and here and func not in COPIES:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        device = kwargs.get("device")
        stays = bool(there) if device is None else is_there(device)
        if func is aten.copy_.default:
            stays = isinstance(args[0], There)
        self.waits += bool(there) and (func in WAITS or not stays)
        own_args, own_kwargs = pytree.tree_unflatten(list(map(_on_the_cpu, flat)), spec)
        found = func(*own_args, **own_kwargs)
        if not stays:
            return found
        wrapped = pytree.tree_map_only(Tensor, There, found)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


@contextlib.contextmanager
def emulated() -> Iterator[Emulation]:
    """Have `torch.device("emulated")`, and count what the host waits for."""

    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    Emulation.current = Emulation()
    with _Made(), Emulation.current as emulation:
        yield emulation
