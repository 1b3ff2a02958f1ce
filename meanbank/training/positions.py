"""The loss of training batches by position, from the losses that a step has anyway."""

from collections.abc import Callable

import torch
from torch import Tensor

from meanbank.data import IGNORED, Batch

PREFIX = "loss_at/"  # of the names in the metrics


class PositionLosses:
    """Sums of losses by position, of the parts of a batch one after the other.

    A token's position is the number of tokens before it that it may see: in its row, or, where
    documents are kept apart, in its document. Buckets double: 0-1, 2-3, 4-7, 8-15 and so on.

    sums, counts: (buckets,) float64, nats and targets of each bucket; ranks have as many buckets as
    each other, for their rows are equally long.
    """

    def __init__(self) -> None:
        self.sums = self.counts = torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def add(self, losses: Tensor, batch: Batch) -> None:
        """Count in the losses (B, T) of a batch."""
        positions, labels = positions_of(batch).contiguous(), batch.labels
        edges = 2 ** torch.arange(1, max(2, (labels.shape[1] - 1).bit_length()))
        buckets = torch.bucketize(positions, edges.to(positions.device), right=True)
        if not len(self.sums):
            self.sums, self.counts = labels.new_zeros(2, len(edges) + 1, dtype=torch.float64)
        counted = labels != IGNORED
        self.sums.index_add_(0, buckets[counted], losses[counted].to(self.sums.dtype))
        self.counts += buckets[counted].bincount(minlength=len(self.counts))

    def means(self, added_up: Callable[..., list[float]] | None = None) -> dict[str, float]:
        """Mean losses as metrics: `loss_at/4-7`, for buckets that have targets.

        added_up: gives the sums over all ranks of the numbers that it is given.
        """
        sums, counts = self.sums.tolist(), self.counts.tolist()
        if added_up is not None:
            numbers = added_up(*sums, *counts)
            sums, counts = numbers[: len(sums)], numbers[len(sums) :]
        return {
            f"{PREFIX}{2**number if number else 0}-{2 ** (number + 1) - 1}": total / count
            for number, (total, count) in enumerate(zip(sums, counts, strict=True))
            if count
        }


def positions_of(batch: Batch) -> Tensor:
    """How many tokens each may see before itself: (B, T) int64."""
    places = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    places = places.expand_as(batch.input_ids)
    if batch.document_ids is None:
        return places
    begins = torch.ones_like(places)
    begins[:, 1:] = batch.document_ids.diff(dim=1)
    return places - (places * begins.ne(0)).cummax(dim=1).values
