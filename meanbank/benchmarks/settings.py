"""What a benchmark runs on: sizes, lengths, dtypes, budgets, and the machine."""

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from meanbank.core.config import choose
from meanbank.core.geometry import Geometry
from meanbank.core.provenance import produced_by
from meanbank.memory import KVM
from meanbank.memory.budgets import Budget, Fixed, PowerLaw, Saturating

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUDGETS: dict[str, Budget] = {
    "fixed": Fixed(count=256),
    "sqrt": PowerLaw(factor=16.0, exponent=0.5),
    "saturating": Saturating(limit=1024),
}
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it runs. threads: of PyTorch's operators; device: "cpu" or "cuda"."""

    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        choose("device", self.device, ("cpu", "cuda"))
        check_positive("threads", self.threads)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda: PyTorch sees no GPU here; leave out --device")

    @property
    def clock(self) -> str:
        """The time that ratios are of: "cpu" (of the process) on one thread, else "wall"."""
        return "cpu" if self.device == "cpu" and self.threads == 1 else "wall"

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """PyTorch with so many threads, and collecting garbage made quick, within the block."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        gc.collect()
        gc.freeze()  # the modules that are there are no garbage
        try:
            yield
        finally:
            gc.unfreeze()
            torch.set_num_threads(before)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def provenance(self, dtype: str) -> dict[str, Any]:
        """What produced a result."""
        return produced_by(device=self.device, dtype=dtype, seed=SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one attention operator.

    batch sequences, heads (of queries, keys and values alike), head_dim channels a head of which
    the first half have rotary positions; chunk_size tokens a block of KVM, whose window has two.
    layers: states that decoding goes round, so that none is in a cache by luck.
    """

    batch: int = 1
    heads: int = 8
    head_dim: int = 128
    chunk_size: int = 256
    layers: int = 24

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_positive(field.name, getattr(self, field.name))
        if self.head_dim % 4:
            raise ValueError(
                f"head_dim must be a multiple of 4 (half of it is rotated), got {self.head_dim}"
            )
        if self.chunk_size < 2:
            raise ValueError(f"chunk_size must be at least 2, got {self.chunk_size}")

    @property
    def rotary_dim(self) -> int:
        """Channels with rotary positions."""
        return self.head_dim // 2

    @property
    def geometry(self) -> Geometry:
        """The same for a layer."""
        return Geometry(
            hidden_size=self.heads * self.head_dim,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
        )

    def memory(self, budget: str) -> KVM:
        """The KVM memory of that name in these sizes."""
        return KVM(budget=BUDGETS[budget], chunk_size=self.chunk_size, merge_gate="none")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is above 0."""
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def check_room(needed: float, what: str) -> None:
    """Raise ValueError where `needed` bytes are more than nine tenths of the machine's memory."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not told here
        return
    if needed > 0.9 * there:
        raise ValueError(
            f"{what} takes {needed / 2**30:.1f} GiB, and there are {there / 2**30:.1f}: give fewer "
            "--layers, shorter --lengths or fewer --arms"
        )


def parse_names(kind: str, text: str, choices: Iterable[str]) -> list[str]:
    """`fixed,sqrt` -> names, each one of the choices and once; ValueError otherwise."""
    choices = list(choices)
    names = [choose(kind, part.strip(), choices) for part in text.split(",") if part.strip()]
    if not names:
        raise ValueError(f"no {kind} is given; choose from {', '.join(choices)}")
    return list(dict.fromkeys(names))


def parse_lengths(text: str) -> list[int]:
    """`512..4096` (doubling), `512,2048`, or both mixed -> lengths in tokens, ascending."""
    lengths: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dots, last = part.partition("..")
        low = _tokens(first, part)
        high = _tokens(last, part) if dots else low
        if high < low:
            raise ValueError(f"lengths {part!r}: the range ends before it begins")
        while low <= high:
            lengths.add(low)
            low *= 2
    if not lengths:
        raise ValueError("no lengths are given; say 512..32768 or 512,2048")
    return sorted(lengths)


def _tokens(text: str, part: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit() or int(text) < 1:
        raise ValueError(
            f"lengths {part!r}: {text!r} is not a positive number of tokens; say 512..32768 "
            "(doubling) or 512,2048"
        )
    return int(text)
