"""How one model is trained on several ranks: each has some rows, and gradients are added up."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meanbank.core.sharded_table import rows_only
from meanbank.model import MeanbankForCausalLM
from meanbank.model.roles import Role, members_of
from meanbank.training.config import TrainingConfig
from meanbank.training.ranks import Ranks
from meanbank.training.sharding import shard_tables

NONE, DENSE, SPARSE = range(3)  # gradients of a parameter


class OneProcess:
    """A model that one process trains.

    forward: the model as parts of a batch go through it, so that gradients come together.
    """

    def __init__(self, model: MeanbankForCausalLM) -> None:
        self.forward: Callable[..., Any] = model

    def part(self, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of a part of a batch, perhaps its last."""
        return contextlib.nullcontext()

    def reduce(self) -> None:
        """Finish the gradients, after all parts: sums over all ranks, None where none has any."""

    def whole(self) -> AbstractContextManager[Any]:
        """Within it every rank has every weight whole, but for tables that are divided."""
        return contextlib.nullcontext()


class DataParallel(OneProcess):
    """Each rank has the whole model (`DistributedDataParallel`).

    Tables are left to `add_up`: it would not expect sparse gradients of them.
    """

    def __init__(self, model: MeanbankForCausalLM, mesh: DeviceMesh) -> None:
        super().__init__(model)
        group = mesh.get_group()
        tables = [member for member in members_of(model) if member.role is Role.TABLE]
        names = [f"model.{member.name}" for member in tables]
        self._group, self._apart = group, _replicated([member.parameter for member in tables])
        holder = _NeverAllUsed(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, names)
        self._wrapped = DistributedDataParallel(
            holder, find_unused_parameters=True, process_group=group
        )
        self._wrapped.register_comm_hook(group, _summed)
        self.forward = self._wrapped

    def part(self, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self._wrapped.no_sync()

    def reduce(self) -> None:
        add_up(self._apart, self._group)


class _NeverAllUsed(nn.Module):
    """A model and a parameter that gets no gradient.

    Which ones get one may depend on the data of a rank, and DDP prints a warning where all do.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(1, device=next(model.parameters()).device))

    def forward(self, **arguments: Any) -> Any:
        return self.model(**arguments)


def _summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class FullySharded(OneProcess):
    """Each rank has a part of every weight (`fully_shard`), block by block.

    But for tables, which are whole or divided by themselves, and single numbers.
    """

    def __init__(self, model: MeanbankForCausalLM, mesh: DeviceMesh) -> None:
        super().__init__(model)
        self._model, self._group = model, mesh.get_group()
        members = members_of(model)
        left = [m for m in members if m.role is Role.TABLE or not m.parameter.ndim]
        self._apart = _replicated([member.parameter for member in left])
        names = {member.name for member in left}
        self._places = {m.name: at for at, m in enumerate(members) if m.name not in names}
        self._used = torch.zeros(len(members), device=model.device)
        self._watched: set[str] = set()
        if "set_reduce_scatter_unused_params" not in dir(FSDPModule):
            raise ValueError(
                "training.parallel=fsdp needs PyTorch 2.13 or newer, here is "
                f"{torch.__version__}: update it, or use ddp"
            )
        # Nothing here changes a block's output in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        backbone: Any = model.model
        for module in (*backbone.layers, model):
            fully_shard(module, mesh=mesh, ignored_params={m.parameter for m in left})
        for prefix, module in model.named_modules():
            if isinstance(module, FSDPModule):
                divided: Any = module
                divided.set_gradient_divide_factor(1.0)  # of the sum
                divided.set_force_sum_reduction_for_comms(True)
                divided.set_reduce_scatter_unused_params(True)
                divided.register_forward_pre_hook(functools.partial(self._watch, prefix))
                # The tensors of its first pass stay, and are none for training if it evaluates.
                divided.unshard()
                divided.reshard()
        self._root: Any = model

    def part(self, last: bool) -> AbstractContextManager[Any]:
        self._root.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def reduce(self) -> None:
        add_up(self._apart, self._group)
        dist.all_reduce(self._used, dist.ReduceOp.MAX, self._group)
        used = self._used.tolist()
        for name, place in self._places.items():
            if not used[place]:  # it has zeros, for ranks must divide the same ones
                self._model.get_parameter(name).grad = None
        self._used.zero_()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        divided = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for module in divided:
            module.set_reshard_after_forward(False, recurse=False)  # nor after a pass
            module.unshard()
        try:
            yield
        finally:
            for module in divided:
                module.set_reshard_after_forward(module is not self._root, recurse=False)
                module.reshard()

    def _watch(self, prefix: str, module: nn.Module, _: Any) -> None:
        """Mark which of the weights that are whole for the pass that begins get a gradient."""
        for name, parameter in module.named_parameters(prefix):
            known = name in self._watched or name not in self._places
            if known or isinstance(parameter, DTensor):  # of a module that has its own pass
                continue
            self._watched.add(name)
            mark = functools.partial(self._mark, self._places[name])
            parameter.register_post_accumulate_grad_hook(mark)

    def _mark(self, place: int, _: Tensor) -> None:
        self._used[place] = 1.0


def arranged(model: MeanbankForCausalLM, settings: TrainingConfig, ranks: Ranks) -> OneProcess:
    """The model as these ranks train it; before its optimizer is made."""
    if settings.checkpointing == "blocks":
        model.activation_checkpointing_enable()
    if settings.compile:
        backbone: Any = model.model
        for block in backbone.layers:
            block.compile()
    if ranks.alone:
        return OneProcess(model)
    mesh = init_device_mesh(model.device.type, (ranks.size,))
    if settings.tables == "sharded":
        shard_tables(model, mesh)
    return PARALLEL[settings.parallel](model, mesh)


PARALLEL = {"ddp": DataParallel, "fsdp": FullySharded}


def _replicated(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if not isinstance(parameter, DTensor)]


def add_up(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace gradients by their sums over the ranks, where any rank has one.

    Dense ones are added up in place, sparse ones row by row, so that as much is sent as there are
    rows: those are coalesced.
    """
    if not parameters:
        return
    kinds = torch.tensor([_kind(each.grad) for each in parameters], device=parameters[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group)
    dense = []
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        if kind == SPARSE:
            parameter.grad = _sum_of_rows(parameter, group)
        elif kind == DENSE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dense.append(parameter.grad)
    for gradient in [each for each in dense if each.ndim]:
        dist.all_reduce(gradient, group=group)
    numbers = [gradient for gradient in dense if not gradient.ndim]
    if numbers:  # in one exchange
        together = torch.stack(numbers)
        dist.all_reduce(together, group=group)
        for number, total in zip(numbers, together, strict=True):
            number.copy_(total)


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return NONE
    return SPARSE if gradient.is_sparse else DENSE


def _sum_of_rows(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of sparse gradients, which have rows (N, width) of another number on each rank."""
    gradient = parameter.grad
    if gradient is None:
        none = torch.zeros(0, dtype=torch.long, device=parameter.device)
        gradient = rows_only(none, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape)
    gradient = gradient.coalesce()
    ids, rows = gradient.indices()[0], gradient.values()
    size = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.long, device=ids.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(ids)], device=ids.device), group=group)
    most = int(torch.cat(counts).max())
    found = [_gathered(_padded(each, most), size, group) for each in (ids, rows)]
    ids, rows = (
        torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])
        for parts in found
    )
    return rows_only(ids, rows, parameter.shape).coalesce()


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _gathered(rows: Tensor, size: int, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(rows) for _ in range(size)]
    dist.all_gather(found, rows, group=group)
    return found
