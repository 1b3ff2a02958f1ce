"""Tables over token ids whose rows are divided over the ranks that train together.

Such a table is a `DTensor`, `Shard(0)` over its ranks: of R ranks each has ceil(rows / R) rows that
follow each other, the last ones fewer or none. A look-up asks the owners for the rows of the ids
that a rank has, once each, and its backward pass sends their gradients back, so that no rank ever
has the whole table or the whole gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_rows(table: Tensor) -> tuple[Tensor, int]:
    """The rows of a table that are here, and the number of the first one; no copy, no gradient."""
    if not isinstance(table, DTensor):
        return table, 0
    with torch.no_grad():
        rows = table.to_local()
    return rows, table.device_mesh.get_local_rank() * rows_a_rank(table)


def rows_a_rank(table: DTensor) -> int:
    """Rows of each rank but the last ones, as `torch.chunk` divides them."""
    return -(-table.shape[0] // table.device_mesh.size())


def look_up_sharded(token_ids: Tensor, table: DTensor, sparse_gradient: bool) -> Tensor:
    """Rows (..., width) of ids (...), which every rank has to call as many times.

    The table gets a gradient of its own rows: a `DTensor`, or with sparse_gradient a
    `torch.sparse_coo` tensor of the whole table's shape with the rows that any rank looked up.
    """
    ids, places = token_ids.unique(return_inverse=True)
    return F.embedding(places, _Fetched.apply(table, ids, sparse_gradient))


class _Fetched(torch.autograd.Function):
    """Rows (N, width) of distinct ids (N,) in order, from whoever has them."""

    @staticmethod
    def forward(ctx: Any, table: DTensor, ids: Tensor, sparse_gradient: bool) -> Tensor:
        group = table.device_mesh.get_group()
        here, first = own_rows(table)
        owners = ids // rows_a_rank(table)
        wanted = owners.bincount(minlength=dist.get_world_size(group))
        given = torch.empty_like(wanted)
        dist.all_to_all_single(given, wanted, group=group)
        ctx.wanted, ctx.given = wanted.tolist(), given.tolist()
        ctx.group, ctx.sparse = group, sparse_gradient
        asked = exchanged(ids, ctx.wanted, ctx.given, group)
        ctx.save_for_backward(table, asked)
        return exchanged(here[asked - first], ctx.given, ctx.wanted, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        table, asked = ctx.saved_tensors
        rows = exchanged(gradient, ctx.wanted, ctx.given, ctx.group)
        if ctx.sparse:
            return rows_only(asked, rows, table.shape), None, None
        here, first = own_rows(table)
        dense = torch.zeros_like(here).index_add_(0, asked - first, rows)
        return _as_table(dense, table), None, None


def rows_only(ids: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """A sparse tensor with rows (N, width) at ids (N,), which may come more than once."""
    return torch.sparse_coo_tensor(ids[None], rows, shape, check_invariants=False)


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Give `sent[r]` of the rows to rank r, in order; what the ranks have given, in order."""
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


def _as_table(rows: Tensor, table: DTensor) -> DTensor:
    return DTensor.from_local(
        rows,
        table.device_mesh,
        table.placements,
        run_check=False,
        shape=table.shape,
        stride=table.stride(),
    )
