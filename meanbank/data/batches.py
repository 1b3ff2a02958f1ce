"""The contract between data and training, and batches of text windows."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meanbank.core.conventions import IGNORED
from meanbank.data.packed import PackedTokens
from meanbank.data.stages import BatchStage, stage_at
from meanbank.data.windows import WINDOWS, Pack, Turns


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to train on.

    `input_ids`: (B, T) int64. `labels`: (B, T) int64, already shifted: `labels[b, t]` is the
    target of `input_ids[b, t]`; -100 is ignored. `document_ids`: (B, T) int64, which change where a
    document begins; None where documents see each other.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None

    def rows(self, first: int, count: int) -> "Batch":
        """`count` rows from row `first` on."""
        here = slice(first, first + count)
        documents = None if self.document_ids is None else self.document_ids[here]
        return Batch(
            input_ids=self.input_ids[here], labels=self.labels[here], document_ids=documents
        )

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        documents = None if self.document_ids is None else self.document_ids.to(device)
        return Batch(
            input_ids=self.input_ids.to(device),
            labels=self.labels.to(device),
            document_ids=documents,
        )

    @property
    def targets(self) -> int:
        """Labels that are not ignored."""
        return int((self.labels != IGNORED).sum())

    def parts(self, count: int) -> "list[Batch]":
        """Its rows in so many parts, in order, whose sizes differ by at most one."""
        rows = torch.arange(len(self.input_ids), device="cpu").tensor_split(count)
        documents = self.document_ids
        return [
            Batch(
                input_ids=self.input_ids[part],
                labels=self.labels[part],
                document_ids=None if documents is None else documents[part],
            )
            for part in rows
        ]


def check_rows(step: int, first: int, count: int, batch_size: int) -> None:
    """Raises ValueError unless a step's batch of `batch_size` rows has these rows."""
    if step < 0:
        raise ValueError(f"steps count from 0, got {step}")
    if first < 0 or count < 1 or first + count > batch_size:
        raise ValueError(f"a batch of {batch_size} rows has no {count} rows from row {first} on")


def document_ids(input_ids: torch.Tensor, end_of_text_id: int) -> torch.Tensor:
    """Documents of rows (B, T), counted from 0; an end of text belongs to what it ends."""
    ends = (input_ids == end_of_text_id).long()
    return ends.cumsum(dim=1) - ends


class TextBatches:
    """Windows of `sequence_length` + 1 tokens of packed tokens, a pure function of the step.

    `packed`: one source, or several, of which windows come in turns, `turns[i]` of source i in a
    cycle. The windows are those of `RingWindows` or, with pack "document", of `DocumentWindows`: an
    epoch of a source visits its windows in a random order. A batch may cross epochs. With pack
    "isolate", documents of a window do not see each other.

    `stages`: parts of the run in order, of shorter rows first; the last one stays. Rows of a
    shorter length are pieces of the same windows, in order: a step reads the tokens that it would
    read without stages, each piece without those before it. So an epoch leaves out no more, and
    sources keep their proportions.

    Raises ValueError when a source has no window.
    """

    def __init__(
        self,
        packed: PackedTokens | Sequence[PackedTokens],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        end_of_text_id: int,
        pack: Pack = "stream",
        turns: Sequence[int] = (1,),
        stages: Sequence[BatchStage] = (),
    ):
        sources = [packed] if isinstance(packed, PackedTokens) else packed
        if len(sources) != len(turns):
            raise ValueError(f"{len(sources)} sources need as many turns, got {list(turns)}")
        self.windows = [
            WINDOWS[pack](source, length=sequence_length, seed=seed, number=number)
            for number, source in enumerate(sources)
        ]
        self.batch_size = batch_size
        self._length = sequence_length
        self._turns = Turns(turns, seed)
        self._end = end_of_text_id
        self._isolate = pack == "isolate"
        self._ends = list(itertools.accumulate(stage.steps for stage in stages))
        self._pieces = [sequence_length // stage.length for stage in stages]

    def rows_at(self, step: int) -> int:
        """The number of rows of the batch of a step: `batch_size`, or more where they are short."""
        return self.batch_size * self._pieces_at(step)

    def batch(self, step: int) -> Batch:
        """The batch of this step, counted from 0: (batch_size, sequence_length).

        In a stage of shorter rows it has as many tokens: (rows_at(step), length).
        """
        return self.rows(step, 0, self.rows_at(step))

    def rows(self, step: int, first: int, count: int) -> Batch:
        """`count` rows of the batch of this step, from row `first` on; the others are not read.

        So ranks and accumulated parts of a step make what belongs to them, of the same batch.
        """
        check_rows(step, first, count, self.rows_at(step))
        pieces = self._pieces_at(step)
        windows = range(first // pieces, (first + count - 1) // pieces + 1)
        tokens = self._windows(step * self.batch_size + windows.start, len(windows))
        length = self._length // pieces
        here = slice(first - windows.start * pieces, first - windows.start * pieces + count)
        inputs = tokens[:, :-1].reshape(-1, length)[here].copy()
        labels = tokens[:, 1:].reshape(-1, length)[here].copy()
        # Nothing in the past tells what the next document is about.
        labels[inputs == self._end] = IGNORED
        input_ids = torch.from_numpy(inputs)
        documents = document_ids(input_ids, self._end) if self._isolate else None
        return Batch(input_ids=input_ids, labels=torch.from_numpy(labels), document_ids=documents)

    def _pieces_at(self, step: int) -> int:
        """Rows that a window is cut into at a step."""
        return self._pieces[stage_at(self._ends, step)] if self._pieces else 1

    def _windows(self, start: int, count: int) -> np.ndarray:
        """Tokens of `count` windows of the run from number `start` on: (count, length + 1)."""
        sources, numbers = self._turns(np.arange(start, start + count, dtype=np.int64))
        tokens = np.empty((count, self._length + 1), dtype=np.int64)
        for source in np.unique(sources):
            here = sources == source
            tokens[here] = self.windows[source].tokens(numbers[here])
        return tokens
