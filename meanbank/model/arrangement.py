"""How the columns of an input are arranged: padding taken out, documents told apart."""

import dataclasses

import torch
from torch import Tensor

from meanbank.core.layout import Layout


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Rows left-aligned without their padding, and the way back.

    length: columns of the input; columns: (B, T') the column of each left-aligned token, and valid:
    (B, T') whether there is one; both None where nothing moves, T' = length.
    """

    layout: Layout
    length: int
    columns: Tensor | None = None
    valid: Tensor | None = None

    def aligned(self, x: Tensor) -> Tensor:
        """(B, length, ...) -> (B, T', ...)."""
        if self.columns is None:
            return x
        return x[torch.arange(len(x), device=x.device)[:, None], self.columns]

    def restored(self, x: Tensor) -> Tensor:
        """(B, T', ...) -> (B, length, ...), zeros at padding."""
        if self.columns is None or self.valid is None:
            return x
        whole = x.new_zeros(x.shape[0], self.length, *x.shape[2:])
        rows, at = self.valid.nonzero(as_tuple=True)
        whole[rows, self.columns[rows, at]] = x[rows, at]
        return whole


def arrange(
    seen: tuple[int, ...],
    length: int,
    mask: Tensor | None,
    document_ids: Tensor | None,
    undo: int = 0,
) -> Arrangement:
    """The arrangement of `length` columns after `seen` tokens of each row.

    mask: (B, length), false at padding, which may stand anywhere; document_ids: (B, length), which
    change where a document begins. A row's first document goes on from what it has seen. undo: see
    `Layout`.
    """
    valid = torch.ones(len(seen), length, dtype=torch.bool)
    if mask is not None:
        valid = mask.to("cpu", torch.bool)
    if bool(valid.all()) and document_ids is None:
        return Arrangement(Layout.ragged(seen, [[length]] * len(seen), undo), length)
    counts = valid.sum(dim=1)
    device = None if mask is None else mask.device
    if document_ids is None:
        documents = [[int(count)] for count in counts]
    else:
        device, ids = document_ids.device, document_ids.cpu()
        documents = [
            torch.unique_consecutive(ids[row][valid[row]], return_counts=True)[1].tolist()
            for row in range(len(seen))
        ]
    layout = Layout.ragged(seen, documents, undo)
    if bool(valid.all()):
        return Arrangement(layout, length)
    width = layout.length
    columns = (~valid).long().argsort(dim=1, stable=True)[:, :width]
    there = torch.arange(width) < counts[:, None]
    return Arrangement(layout, length, columns.to(device), there.to(device))
