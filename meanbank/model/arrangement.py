"""How the columns of an input are arranged: padding taken out, documents told apart."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from meanbank.core.layout import Layout
from meanbank.core.record import NOTHING, Record


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Rows left-aligned without their padding, and the way back.

    length: columns of the input; columns: (B, T') the column of each left-aligned token, and valid:
    (B, T') whether there is one; both None where nothing moves, T' = length. last_ids: each row's
    last document id, where ids were given.
    """

    layout: Layout
    length: int
    columns: Tensor | None = None
    valid: Tensor | None = None
    last_ids: Sequence[int | None] = ()

    def aligned(self, x: Tensor) -> Tensor:
        """(B, length, ...) -> (B, T', ...)."""
        if self.columns is None:
            return x
        return x[torch.arange(len(x), device=x.device)[:, None], self.columns.to(x.device)]

    def restored(self, x: Tensor) -> Tensor:
        """(B, T', ...) -> (B, length, ...), zeros at padding."""
        if self.columns is None or self.valid is None:
            return x
        whole = x.new_zeros(x.shape[0], self.length, *x.shape[2:])
        columns, valid = self.columns.to(x.device), self.valid.to(x.device)
        rows, at = valid.nonzero(as_tuple=True)
        whole[rows, columns[rows, at]] = x[rows, at]
        return whole


@torch.compiler.disable(reason="which rows go together depends on what the tensors hold")
def arrange(
    seen: tuple[int, ...],
    length: int,
    mask: Tensor | None,
    document_ids: Tensor | None,
    last_ids: Sequence[int | None],
    record: Record = NOTHING,
) -> Arrangement:
    """The arrangement of `length` columns after `seen` tokens of each row.

    mask: (B, length), false at padding, which may stand anywhere; document_ids: (B, length), which
    change where a document begins; last_ids: those of the last tokens seen, where they were given.
    A row's first document goes on from what it has seen unless its id differs from the last.
    record: see `Layout`.
    """
    plain = Layout.ragged(seen, [[length]] * len(seen), record=record)
    if mask is None and document_ids is None:
        return Arrangement(plain, length, last_ids=last_ids)
    valid = torch.ones(len(seen), length, dtype=torch.bool, device="cpu")
    if mask is not None:
        valid = mask.to("cpu", torch.bool)
    if document_ids is None and (mask is None or bool(valid.all())):
        return Arrangement(plain, length, last_ids=last_ids)
    counts = valid.sum(dim=1)
    device, goes_on = None if mask is None else mask.device, None
    if document_ids is None:
        documents = [[int(count)] for count in counts]
    else:
        device, ids = document_ids.device, document_ids.cpu()
        rows = [
            torch.unique_consecutive(ids[row][valid[row]], return_counts=True)
            for row in range(len(seen))
        ]
        documents = [lengths.tolist() for _, lengths in rows]
        names = [row.tolist() for row, _ in rows]
        goes_on = [
            last is None or not name or name[0] == last
            for name, last in zip(names, last_ids, strict=True)
        ]
        last_ids = [n[-1] if n else last for n, last in zip(names, last_ids, strict=True)]
    layout = Layout.ragged(seen, documents, goes_on, record)
    if bool(valid.all()):
        return Arrangement(layout, length, last_ids=last_ids)
    width = layout.length
    columns = (~valid).long().argsort(dim=1, stable=True)[:, :width]
    there = torch.arange(width, device="cpu") < counts[:, None]
    return Arrangement(layout, length, columns.to(device), there.to(device), last_ids)
