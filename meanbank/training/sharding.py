"""Tensors that are divided over ranks, whole tensors, and how one becomes the other."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meanbank.model.roles import Role, members_of, pick


def here(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor divided as another one is; every rank takes its part of what it has."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def shard_tables(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the rows of all tables over token ids, see `core.sharded_table`."""
    for member in pick(members_of(model), Role.TABLE):
        rows = distribute_tensor(member.parameter.data, mesh, [Shard(0)], src_data_rank=None)
        owner, _, name = member.name.rpartition(".")
        # cloned, so that nothing of the whole table stays
        setattr(model.get_submodule(owner), name, nn.Parameter(rows.clone()))
