"""Batches made ahead of the step that needs them."""

import collections
import dataclasses
import itertools
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from meanbank.data.batches import Batch


class Batches(Protocol):
    """Batches as a pure function of the step."""

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        ...


class Shared(Batches, Protocol):
    """Batches that are made a part at a time."""

    def rows_at(self, step: int) -> int:
        """The number of rows of the batch of a step."""
        ...

    def rows(self, step: int, first: int, count: int) -> Batch:
        """`count` rows of the batch of a step, from row `first` on."""
        ...


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of every batch that belong to a rank, divided as `Batch.parts` does."""

    batches: Shared
    rank: int
    ranks: int

    def batch(self, step: int) -> Batch:
        """The rows of this rank; the others are not read."""
        some, more = divmod(self.batches.rows_at(step), self.ranks)
        first = self.rank * some + min(self.rank, more)
        return self.batches.rows(step, first, some + (self.rank < more))


def batches_ahead(batches: Batches, steps: range, workers: int) -> Generator[Batch, None, None]:
    """The batches of these steps in order; `workers` threads make up to two each in advance.

    They change nothing but the time that it takes: a batch depends on its step alone. 0 makes each
    when it is asked for.
    """
    if not workers:
        yield from map(batches.batch, steps)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        todo = iter(steps)
        waiting = collections.deque(
            pool.submit(batches.batch, step) for step in itertools.islice(todo, 2 * workers)
        )
        while waiting:
            batch = waiting.popleft().result()
            waiting.extend(pool.submit(batches.batch, s) for s in itertools.islice(todo, 1))
            yield batch
