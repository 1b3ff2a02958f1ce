"""What the machine can do at best: matrix products and reading memory, timed among the arms."""

import dataclasses
from collections.abc import Mapping

import torch

from meanbank.benchmarks.settings import Machine
from meanbank.benchmarks.timing import Arm, Timing, alternate

PRODUCT, READ = "ceiling: product", "ceiling: read"  # names of the two arms


@dataclasses.dataclass(frozen=True)
class Probes:
    """Arms that measure the ceilings, and what one run of each does.

    flops: of one product of square matrices in `dtype`; nbytes: read by one sum over more memory
    than caches hold.
    """

    arms: dict[str, Arm]
    flops: int
    nbytes: int

    def ceilings(self, timings: Mapping[str, Timing], clock: str) -> "Ceilings":
        """The rates that the two arms reached, by that clock."""
        return Ceilings(
            flops_per_second=self.flops / timings[PRODUCT].seconds(clock),
            bytes_per_second=self.nbytes / timings[READ].seconds(clock),
        )


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """FLOPs a second of a matrix product, and bytes a second read from memory."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, nbytes: float) -> tuple[float, str]:
        """The least time for so much work, and which of "flops" and "bytes" sets it."""
        compute, read = flops / self.flops_per_second, nbytes / self.bytes_per_second
        return (compute, "flops") if compute >= read else (read, "bytes")


def probes(machine: Machine, dtype: torch.dtype, *, side: int = 0, nbytes: int = 0) -> Probes:
    """side: of the square matrices, default 1024 (GPU 8192); nbytes: default 256 MiB (4 GiB)."""
    gpu = machine.device == "cuda"
    side = side or (8192 if gpu else 1024)
    nbytes = nbytes or (2**32 if gpu else 2**28)
    left = torch.randn(side, side, device=machine.device).to(dtype)
    right, product = torch.randn_like(left), torch.empty_like(left)
    block = torch.ones(nbytes // 4, device=machine.device)
    arms = {
        PRODUCT: Arm(run=lambda _: torch.mm(left, right, out=product)),
        READ: Arm(run=lambda _: block.sum()),
    }
    return Probes(arms, 2 * side**3, nbytes)


def product_flops_per_second(machine: Machine, dtype: torch.dtype) -> float:
    """The rate of the product alone, the median of up to nine turns within a second or so.

    Random numbers drawn afterwards are as if this had not been.
    """
    with torch.random.fork_rng(devices=[] if machine.device == "cpu" else None):
        probe = probes(machine, dtype, nbytes=4)
    timing = alternate({PRODUCT: probe.arms[PRODUCT]}, machine, rounds=9, seconds=0.5)[PRODUCT]
    return probe.flops / timing.seconds(machine.clock)
