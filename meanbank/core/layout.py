"""Layout: where the tokens of one call stand in their sequences.

Most calls are uniform: every row of the batch reads T tokens that follow the same number of earlier
ones. Rows of different lengths and packed documents are made of spans, and only what looks across
tokens has to know: a memory gets one span at a time.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from meanbank.core.record import NOTHING, Record
from meanbank.core.tail import Tail


@dataclasses.dataclass(frozen=True)
class Span:
    """`length` new tokens of each of some rows that follow `seen` earlier ones.

    rows: their indices in the batch, None for all; start: the column of the first token; record:
    what the state after this call keeps besides.
    Positions come from tokens seen, never from how many rows a memory holds.
    """

    seen: int
    length: int
    rows: tuple[int, ...] | None = None
    start: int = 0
    record: Record = NOTHING

    @property
    def total(self) -> int:
        """Tokens seen after this call."""
        return self.seen + self.length

    @property
    def stop(self) -> int:
        """The column after the last token."""
        return self.start + self.length

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of the new tokens, (T,)."""
        return torch.arange(self.seen, self.total, device=device)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The spans of a batch of T columns; columns of a row that no span covers are padding.

    Tokens of a row are left-aligned: its spans follow each other from column 0, and only the first
    of them goes on from what the row has seen before; each later one begins a document.
    record: what the states after this call keep besides.
    """

    seen: tuple[int, ...]  # by each row before this call
    length: int
    spans: tuple[Span, ...]
    record: Record = NOTHING

    @classmethod
    def uniform(cls, batch: int, seen: int, length: int, record: Record = NOTHING) -> "Layout":
        """Every row reads `length` tokens after `seen`."""
        return cls((seen,) * batch, length, (Span(seen, length, record=record),), record)

    @property
    def batch(self) -> int:
        return len(self.seen)

    @classmethod
    def ragged(
        cls,
        seen: Sequence[int],
        documents: Sequence[Sequence[int]],
        goes_on: Sequence[bool] | None = None,
        record: Record = NOTHING,
    ) -> "Layout":
        """Row r, which has seen seen[r] tokens, reads documents of lengths documents[r].

        Its first document goes on from the tokens seen, unless goes_on[r] is false; the others
        start afresh.
        """
        length = max(1, *(sum(lengths) for lengths in documents))
        first = [n if goes_on is None or goes_on[row] else 0 for row, n in enumerate(seen)]
        if len(set(first)) == 1 and all(list(lengths) == [length] for lengths in documents):
            return cls.uniform(len(seen), first[0], length, record)
        rows: dict[tuple[int, int, int], list[int]] = {}
        for row, lengths in enumerate(documents):
            start = 0
            for number, count in enumerate(lengths):
                if count:
                    key = (start, first[row] if number == 0 else 0, count)
                    rows.setdefault(key, []).append(row)
                start += count
        spans = (
            Span(before, n, tuple(held), at, record)
            for (at, before, n), held in sorted(rows.items())
        )
        return cls(tuple(seen), length, tuple(spans), record)

    @property
    def is_uniform(self) -> bool:
        return self.spans[0].rows is None if self.spans else False

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each row."""
        if self.is_uniform:
            return (self.length,) * self.batch
        lengths = [0] * self.batch
        for span in self.spans:
            for row in span.rows or ():
                lengths[row] = max(lengths[row], span.stop)
        return tuple(lengths)

    @functools.cached_property
    def total(self) -> tuple[int, ...]:
        """Tokens seen by each row after this call, in its last document."""
        if self.is_uniform:
            return (self.spans[0].total,) * self.batch
        total = list(self.seen)
        for span in self.spans:  # sorted by column: the last one of a row stays
            for row in span.rows or ():
                total[row] = span.total
        return tuple(total)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of the new tokens: (T,), or (B, T) where rows differ; padding has 0."""
        if self.is_uniform:
            return self.spans[0].positions(device)
        positions = torch.zeros(self.batch, self.length, dtype=torch.long, device="cpu")
        for span in self.spans:
            positions[list(span.rows or ()), span.start : span.stop] = span.positions("cpu")
        return positions.to(device)

    def before(self, x: Tensor, carried: Tail | None, *, zero: bool) -> Tensor:
        """What stands before each token of x (B, T, W): the token before it in its document.

        carried: what `last` gave after each row's last call, None at the start. Before a
        document's first token stands zero, or that token itself.
        """
        first = torch.zeros_like(x[:, :1]) if zero else x[:, :1]
        if carried is not None and self.is_uniform and self.spans[0].seen:
            first = carried.last.to(x.dtype)
        before = torch.cat([first, x[:, :-1]], dim=1)
        if self.is_uniform:
            return before
        begins = torch.zeros(self.batch, self.length, 1, dtype=torch.bool, device="cpu")
        goes_on = torch.zeros(self.batch, 1, 1, dtype=torch.bool, device="cpu")
        for span in self.spans:
            if span.seen:
                goes_on[list(span.rows or ()), 0] = True
            else:
                begins[list(span.rows or ()), span.start] = True
        before = torch.where(begins.to(x.device), 0.0 if zero else x, before)
        if carried is not None:
            old = torch.where(goes_on.to(x.device), carried.last.to(x.dtype), before[:, :1])
            before = torch.cat([old, before[:, 1:]], dim=1)
        return before

    def last(self, x: Tensor, carried: Tail | None) -> Tail:
        """The last token of each row of x (B, T, W), or what it carried where it reads none; and
        as many before it as the record takes."""
        if self.is_uniform and not self.record.undo:  # as below, without counting row by row
            return Tail(x[:, -1:].clone(), (0,) * self.batch)
        depths = tuple(min(depth, self.record.undo) for depth in self._depths(carried))
        held = [min(depth + 1, total) for depth, total in zip(depths, self.total, strict=True)]
        return Tail(self._ends(x, carried, held, at_least=1), depths)

    def extended(self, x: Tensor, carried: Tail | None) -> Tail:
        """The tokens of x (B, T, W) after all those carried, of each row's last document."""
        depths = self._depths(carried)
        return Tail(self._ends(x, carried, depths), depths)

    def _depths(self, carried: Tail | None) -> tuple[int, ...]:
        """How many of each row's last tokens can be told from what is carried and new."""
        old = (0,) * self.batch if carried is None else carried.depths
        return tuple(
            total if begins else depth + new
            for total, begins, depth, new in zip(
                self.total, self.begins, old, self.lengths, strict=True
            )
        )

    @functools.cached_property
    def begins(self) -> tuple[bool, ...]:
        """Whether each row's last document begins in this call."""
        if self.is_uniform:
            return (self.spans[0].seen == 0,) * self.batch
        begins = [False] * self.batch
        for span in self.spans:  # sorted by column: the last one of a row stays
            for row in span.rows or ():
                begins[row] = span.seen == 0
        return tuple(begins)

    def _ends(
        self, x: Tensor, carried: Tail | None, held: Sequence[int], at_least: int = 0
    ) -> Tensor:
        """The last held[r] tokens of each row, of those carried and x: right-aligned, zeros before.

        Tokens of x (B, T, W) are left-aligned; returns (B, max(held), W).
        """
        width, old = max(at_least, *held), 0
        if carried is not None and not (self.is_uniform and width <= self.length):
            x = torch.cat([carried.tokens.to(x.dtype), x], dim=1)
            old = carried.tokens.shape[1]
        if self.is_uniform:
            return x[:, x.shape[1] - width :].clone()
        back = torch.arange(width, 0, -1, device="cpu")  # distances from the end
        index = old + torch.tensor(self.lengths, device="cpu")[:, None] - back
        there = back <= torch.tensor(held, device="cpu")[:, None]
        index = index.clamp_min(0)[..., None].expand(-1, -1, x.shape[2])
        ends = x.gather(1, index.to(x.device))
        return ends.masked_fill(~there[..., None].to(x.device), 0)
