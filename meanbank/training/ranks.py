"""The processes that train one model together, as torchrun starts them, and what they agree on.

One process alone has no process group, and everything here costs it nothing. Of several, rank 0
speaks: it prints, writes and has the run's folder. What goes wrong anywhere ends all of them, and
is told in one line by the lowest rank that is left.
"""

import atexit
import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meanbank.core.errors import one_line
from meanbank.core.progress import silence

STARTING = timedelta(minutes=10)  # until all ranks are there
STEP = timedelta(minutes=30)  # for which a rank waits for another in one exchange
ROLL_CALL = 10.0  # seconds in which ranks that are alive notice that another one is not
FAREWELL = 5.0  # seconds for rank 0 to say why all end
SPACE = 32  # which JSON may have at its end
POLL = 0.02  # seconds between two looks at what others have said
# What `torch.distributed` says when another process, or the way to it, is gone.
_CUT = re.compile(r"\b(gloo|nccl|connection|socket|peer|timed? ?out)\b", re.IGNORECASE)
# What a user can put right, or has asked for; the rest is a bug, which a rank shows where it is.
_TOLD = (ValueError, ImportError, OSError, KeyboardInterrupt)


class LostRankError(ValueError):
    """Ranks have ended or do not answer, so training cannot go on; `speaker` tells it."""

    def __init__(self, message: str, speaker: int) -> None:
        super().__init__(message)
        self.speaker = speaker


class Ranks:
    """This process, `rank` of `size`; rank 0 leads. `store` is there where there are several."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._exchanges = 0  # through the store
        self._connected = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def store(self) -> dist.Store:
        assert self._store is not None
        return self._store

    def connect(self, device: str) -> torch.device:
        """Make the process group for tensors on "cpu" or "cuda"; returns this rank's own device."""
        own = torch.device(device)
        if self.alone:
            return own
        if device == "cuda":
            own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(own)
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                store=dist.PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=STEP,
            )
            self._connected = True
        return own

    def disconnect(self) -> None:
        """End the process group that `connect` has made, when all ranks are done."""
        if self._connected:
            dist.destroy_process_group()
            self._connected = False

    def sum(self, *numbers: float) -> list[float]:
        """Each number added up over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def _reduced(self, numbers: tuple[float, ...], how: Any) -> list[float]:
        if self.alone:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, how)
        return tensor.tolist()

    def meet(self) -> None:
        """Wait until all are here."""
        self.sum(0.0)

    def gathered(self, value: Any) -> list[Any]:
        """What each rank has (plain data), in order, on every rank."""
        if self.alone:
            return [value]
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        (most,) = map(int, self.largest(len(text)))
        texts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.cat([text, text.new_full((most - len(text),), SPACE)]))
        return [json.loads(bytes(each.tolist())) for each in texts]

    def told(self, value: Any = None) -> Any:
        """What rank 0 has (plain data), on every rank, however long that takes it.

        For what comes before the loop: who waits does not notice when rank 0 dies, and ends by the
        signal that torchrun then sends.
        """
        if self.alone:
            return value
        self._exchanges += 1
        key = f"told/{self._exchanges}"
        if self.leads:
            self.store.set(key, json.dumps(value))
        while not self.store.check([key]):  # its `wait` would print a warning for each time-out
            self._check_failed([0])
            time.sleep(POLL)
        return json.loads(self.store.get(key))

    def in_turn(self, call: Callable[[], Any]) -> Any:
        """What `call` gives here, once it is done on rank 0; where it fails there, all end."""
        if not self.leads:
            self.told()
            return call()
        result = call()
        self.told()
        return result

    def _check_failed(self, ranks: Iterable[int]) -> None:
        """Raise LostRankError where one of these has failed with an error; rank 0 tells it."""
        for rank in ranks:
            if self.store.check([f"failed/{rank}"]):
                reason = json.loads(self.store.get(f"failed/{rank}"))
                raise LostRankError(f"rank {rank}: {reason}", speaker=0)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, ranks that are lost become a LostRankError that names them."""
        try:
            yield
        except RuntimeError as error:
            cut = isinstance(error, dist.DistError) or _CUT.search(str(error))
            if self.alone or not cut:
                raise
            self._call_roll(error)

    def _call_roll(self, error: RuntimeError) -> None:
        """Raise LostRankError for who does not answer; all that are alive come here soon."""
        others, missing = [rank for rank in range(self.size) if rank != self.rank], [0]
        with contextlib.suppress(dist.DistError):  # without torchrun the store goes with rank 0
            self.store.set(f"here/{self.rank}", "")
            end = time.monotonic() + ROLL_CALL
            while missing and time.monotonic() < end:
                self._check_failed(others)
                missing = [rank for rank in others if not self.store.check([f"here/{rank}"])]
                time.sleep(POLL)
        if not missing:
            raise LostRankError(f"the ranks lost each other: {one_line(error)}", 0) from error
        names = " and ".join(map(str, missing))
        left = min(rank for rank in range(self.size) if rank not in missing)
        raise LostRankError(
            f"rank {names} of {self.size} died or does not answer; go on from the last checkpoint "
            "with the same command and --resume",
            left,
        ) from error

    @contextlib.contextmanager
    def spoken_for(self) -> Iterator[None]:
        """Within it, errors for users are raised on one rank only; the others end silently."""
        try:
            with self.watched():
                yield
        except SystemExit:
            raise
        except LostRankError as error:
            if error.speaker == self.rank:
                raise
            self.leave()
        except BaseException as error:
            with contextlib.suppress(dist.DistError):
                self.store.set(f"failed/{self.rank}", json.dumps(one_line(error)))
            if self.leads or not isinstance(error, _TOLD):
                raise
            self.leave()

    def leave(self, code: int = 2) -> NoReturn:
        """End once rank 0 has: torchrun ends all others with the first one."""
        _ending()
        end = time.monotonic() + FAREWELL
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < end and not self.store.check(["over"]):
                time.sleep(POLL)
        sys.exit(code)

    def over(self) -> None:
        """Tell the others that this process is at its end."""
        _ending()
        with contextlib.suppress(dist.DistError):
            self.store.set("over", "")


def _ending() -> None:
    """End with the own exit code, although torchrun asks all to end once the first one has."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


_together: Ranks | None = None
_times = itertools.count()


@contextlib.contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that torchrun has started, until training is over; one without it.

    Within it the same ones are given again. Ranks other than 0 show no progress, and end silently
    where an error is rank 0's to tell.
    """
    global _together  # noqa: PLW0603
    size = os.environ.get("WORLD_SIZE", "")
    if _together is not None:
        yield _together
    elif not size.isdigit() or int(size) == 1:
        yield Ranks()
    else:
        store, rank, _ = next(dist.rendezvous("env://", timeout=STARTING))
        prefix = f"meanbank/{next(_times)}"  # a process may train more than once
        _together = Ranks(rank, int(size), dist.PrefixStore(prefix, store))
        if _together.leads:
            atexit.register(_together.over)
        try:
            with _together.spoken_for(), contextlib.nullcontext() if not rank else silence():
                yield _together
            _together.disconnect()
        finally:
            _together = None
