"""Batches made ahead of the step that needs them."""

import collections
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
