"""How many bytes a computation has at once, beyond what was there before."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meanbank.benchmarks.settings import Machine


def peak_bytes(function: Callable[[], Any], machine: Machine) -> int:
    """Most bytes alive at a time that `function` allocates, what it returns included.

    On a CPU all events of PyTorch's allocator are added up, so that what kernels allocate inside
    counts, too; on a GPU its allocator's own maximum is read.
    """
    if machine.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # garbage that were freed within would hide as many new bytes
    result = None
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_stderr():
        recorder.start()
    try:
        result = function()
    finally:
        with _without_stderr():
            recorder.stop()
    del result
    return _highest(_allocations(recorder))


def _allocations(recorder: profile) -> list[int]:
    """Bytes allocated (or, negative, freed), in order."""
    inner: Any = recorder.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in events]


def _highest(changes: list[int]) -> int:
    current = highest = 0
    for change in changes:
        current += change
        highest = max(highest, current)
    return highest


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Some builds of the profiler print lines of their own where it starts and stops."""
    sys.stderr.flush()
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
