"""Tables over token ids that are no parameters: their rows are read where they are stored."""

import abc
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meanbank.core.errors import BankStorageError
from meanbank.core.mapped_file import Mapped
from meanbank.core.sharded_table import look_up_sharded

PARTS = (".rows", ".scale")  # of an int8 table, after its name
LEVELS = 127  # the largest int8 number in use; -128 is not, so that signs are alike
PIECE = 1024  # rows that are quantised at a time


class StoredTable(nn.Module, abc.ABC):
    """A table (vocabulary, width) for inference, in main memory or in a mapped file.

    Rows come in the dtype that the module was last moved to and on the device of the ids; the table
    itself stays where it is. `state_dict` has it, `load_state_dict` cannot change it.
    """

    _is_hf_initialized = True  # start values leave it alone

    def __init__(self, parts: Sequence[Tensor | Mapped], dtype: torch.dtype) -> None:
        super().__init__()
        self.mapped = tuple(part for part in parts if isinstance(part, Mapped))
        self.tensors = tuple(p.tensor if isinstance(p, Mapped) else p for p in parts)
        for part in self.mapped:
            part.expect_rows()
        # without numbers: it takes part in `model.to(dtype)`, which the table must not
        self.register_buffer("like", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)

    @abc.abstractmethod
    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows (..., width) of ids (...) in main memory, before they are cast."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Rows (..., width) of ids (...); BankStorageError where they would have to be trained."""
        if self.training and torch.is_grad_enabled():
            raise BankStorageError(
                "tables that are not resident cannot be trained: load the model with "
                "bank_storage='resident', or call model.eval()"
            )
        rows = self.rows(token_ids.cpu())
        return rows.to(device=token_ids.device, dtype=self.dtype)

    def prefetch(self, token_ids: Tensor) -> None:
        """Let the system begin to read the rows of some distinct ids (N,) in main memory."""
        for part in self.mapped:
            part.prefetch(token_ids)

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows that it gives."""
        like: Any = self.like
        return like.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensors[0].shape

    @property
    def resident_nbytes(self) -> int:
        """Bytes of main memory that are its own, whatever the system keeps of a file."""
        return 0 if self.mapped else sum(tensor.nbytes for tensor in self.tensors)

    def extra_repr(self) -> str:
        where = "mapped from a file" if self.mapped else "in main memory"
        return f"{tuple(self.shape)}, {self.tensors[0].dtype}, {where}"

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        raise BankStorageError(
            f"{prefix[:-1]} is not resident and cannot be loaded again: use "
            "from_pretrained(..., bank_storage='resident')"
        )

    def __deepcopy__(self, memo: dict) -> "StoredTable":
        parts = self.mapped or self.tensors  # which never change
        return type(self)(parts, self.dtype).train(self.training)


class FloatTable(StoredTable):
    """Floating-point rows: exactly those that a parameter of its dtype would have."""

    def rows(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.tensors[0])

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination[prefix[:-1]] = self.tensors[0].to(self.dtype)  # under a parameter's name


class Int8Table(StoredTable):
    """Rows in int8, (vocabulary, width), and a scale a row and head in fp32, (vocabulary, heads).

    A number is its int8 times the scale, so it is off by half a scale at most.
    """

    def rows(self, token_ids: Tensor) -> Tensor:
        rows, scale = (F.embedding(token_ids, tensor) for tensor in self.tensors)
        by_head = rows.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype)
        return (by_head * scale[..., None]).flatten(-2)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        for part, tensor in zip(PARTS, self.tensors, strict=True):
            destination[prefix[:-1] + part] = tensor


Table = Tensor | StoredTable


def look_up(token_ids: Tensor, table: Table, sparse_gradient: bool = False) -> Tensor:
    """Rows (..., width) of ids (...); sparse_gradient: whether the table gets one.

    The rows of a table may be divided over ranks, see `sharded_table`.
    """
    if isinstance(table, StoredTable):
        return table(token_ids)
    if isinstance(table, DTensor):
        return look_up_sharded(token_ids, table, sparse_gradient)
    return F.embedding(token_ids, table, sparse=sparse_gradient)


def floating(table: Table) -> Tensor | None:
    """The table as one tensor of the dtype of its rows, read without a copy; None if it has none.

    A mapped one is in main memory, wherever the rows are wanted.
    """
    if not isinstance(table, StoredTable):
        return table
    (tensor, *others) = table.tensors
    return tensor if not others and tensor.dtype == table.dtype else None


def weights_of(table: Table) -> tuple[Tensor, ...]:
    """The tensors that its rows depend on."""
    return table.tensors if isinstance(table, StoredTable) else (table,)


def quantized(table: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The parts of an `Int8Table`: the largest number of a row's head becomes 127 or -127.

    table: (vocabulary, width), read a piece at a time; ValueError where it is not finite.
    """
    rows = torch.empty(table.shape, dtype=torch.int8, device=table.device)
    scale = torch.empty(len(table), heads, device=table.device)
    for at in range(0, len(table), PIECE):
        piece = table[at : at + PIECE].float().unflatten(1, (heads, -1))
        largest = piece.abs().amax(2)
        if not largest.isfinite().all():
            raise ValueError("a table has numbers that are not finite, and no int8 form")
        # not the smallest numbers that there are, whose quotient is not finite
        own = (largest / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        scale[at : at + PIECE] = own
        rows[at : at + PIECE] = (piece / own[..., None]).round().to(torch.int8).flatten(1)
    return rows, scale
