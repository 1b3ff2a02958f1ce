"""The contract between data and training, and batches of text windows."""

from dataclasses import dataclass

import numpy as np
import torch

from meanbank.data.packed import PackedTokens

IGNORED = -100


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
        rows = torch.arange(len(self.input_ids)).tensor_split(count)
        documents = self.document_ids
        return [
            Batch(
                input_ids=self.input_ids[part],
                labels=self.labels[part],
                document_ids=None if documents is None else documents[part],
            )
            for part in rows
        ]


def document_ids(input_ids: torch.Tensor, end_of_text_id: int) -> torch.Tensor:
    """Documents of rows (B, T), counted from 0; an end of text belongs to what it ends."""
    ends = (input_ids == end_of_text_id).long()
    return ends.cumsum(dim=1) - ends


class TextBatches:
    """Windows of `sequence_length` + 1 tokens of a packed stream, a pure function of the step.

    The stream is read as a ring, so the end of the last document is followed by the first one. An
    epoch cuts it at a random offset into windows whose inputs do not overlap (less than one window
    is left out) and visits them in a random order; offset and order depend on `seed` and the
    epoch only. A batch may cross epochs. With `isolate`, documents of a window do not see each
    other.

    Raises ValueError when the stream has fewer than `sequence_length` + 1 tokens.
    """

    def __init__(
        self,
        packed: PackedTokens,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        end_of_text_id: int,
        isolate: bool = False,
    ):
        if len(packed.tokens) < sequence_length + 1:
            raise ValueError(
                f"the split has {len(packed.tokens)} tokens, a window needs {sequence_length + 1}: "
                "use more text or a smaller data.sequence_length"
            )
        self.windows_per_epoch = len(packed.tokens) // sequence_length
        self._tokens = packed.tokens
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._seed = seed
        self._end = end_of_text_id
        self._isolate = isolate
        self._epoch = -1, np.empty(0, dtype=np.int64)

    def batch(self, step: int) -> Batch:
        """The batch of this step, counted from 0: (batch_size, sequence_length)."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        starts = self.window_starts(step)
        positions = starts[:, None] + np.arange(self._sequence_length + 1)
        rows = self._tokens[positions % len(self._tokens)].astype(np.int64)
        inputs, labels = rows[:, :-1], rows[:, 1:].copy()
        # Nothing in the past tells what the next document is about.
        labels[inputs == self._end] = IGNORED
        input_ids = torch.from_numpy(inputs.copy())
        documents = document_ids(input_ids, self._end) if self._isolate else None
        return Batch(input_ids=input_ids, labels=torch.from_numpy(labels), document_ids=documents)

    def window_starts(self, step: int) -> np.ndarray:
        """First position of each window of a step's batch: (batch_size,) int64."""
        first = step * self._batch_size
        windows = range(first, first + self._batch_size)
        places = [divmod(window, self.windows_per_epoch) for window in windows]
        return np.array([self._starts(epoch)[place] for epoch, place in places], dtype=np.int64)

    def _starts(self, epoch: int) -> np.ndarray:
        # Only a cache: the permutation of one epoch, made again after a jump. Number and starts are
        # one value, for threads ask here at the same time.
        cached, starts = self._epoch
        if epoch != cached:
            generator = np.random.default_rng((self._seed, epoch))
            offset = generator.integers(len(self._tokens))
            order = generator.permutation(self.windows_per_epoch)
            starts = (offset + order * self._sequence_length) % len(self._tokens)
            self._epoch = epoch, starts
        return starts
