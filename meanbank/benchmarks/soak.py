"""A long text read piece by piece: what it takes per token, and what is held, as it gets longer."""

import ctypes
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanbank.benchmarks.ceilings import Ceilings, probes
from meanbank.benchmarks.limits import Work
from meanbank.benchmarks.model import ARMS, ModelBenchmark, ModelSizes
from meanbank.benchmarks.peak import peak_bytes
from meanbank.benchmarks.records import Measured, Record, records_of
from meanbank.benchmarks.settings import DTYPES, SEED, Machine, check_positive
from meanbank.benchmarks.timing import Timing, alternate
from meanbank.core.config import choose
from meanbank.core.progress import progress
from meanbank.model import MeanbankCache, MeanbankForCausalLM

WARM = 4  # pieces, after which the process has what it will have


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoakBenchmark:
    """What `meanbank bench soak` measures.

    Peaks are taken when a model has read everything, from what its cache was at each length, kept
    in a file, so that measuring them does not show in the memory of the process.

    lengths: tokens after which to look, ascending; time is of the median piece since the one
    before. piece: tokens read at a time. arms: models as in `ModelBenchmark`.
    """

    machine: Machine = Machine()
    sizes: ModelSizes = ModelSizes()
    lengths: tuple[int, ...] = (8192, 65536, 524288)
    piece: int = 2048
    dtype: str = "float32"
    arms: tuple[str, ...] = ("fixed", "sqrt")

    def __post_init__(self) -> None:
        for arm in self.arms:
            choose("model", arm, ARMS)
        choose("dtype", self.dtype, DTYPES)
        check_positive("piece", self.piece)

    def run(self) -> Iterator[Record]:
        """Yield the record of each model at each length as soon as it has read so much."""
        kind = DTYPES[self.dtype]
        models = ModelBenchmark(machine=self.machine, sizes=self.sizes)
        total = len(self.arms) * max(self.lengths)
        with self.machine.settled(), progress("bench soak", total) as report:
            probe = probes(self.machine, kind)
            timings = alternate(probe.arms, self.machine, rounds=5, seconds=5.0)
            ceilings = probe.ceilings(timings, self.machine.clock)
            for arm in self.arms:
                model = models.model(arm, kind).eval()
                with tempfile.TemporaryDirectory() as folder:
                    looks = list(self._stretches(models, model, arm, Path(folder), report))
                    for measured, path in looks:
                        cache = MeanbankCache.load(path, model)
                        extra = {**measured.extra, **self._held(model, cache)}
                        whole = dataclasses.replace(measured, extra=extra)
                        yield from self._record(whole, cache.seen, ceilings)

    def _stretches(
        self,
        models: ModelBenchmark,
        model: MeanbankForCausalLM,
        arm: str,
        folder: Path,
        report: Any,
    ) -> Iterator[tuple[Measured, Path]]:
        """Speed and resident memory of each stretch, and the file of the cache at its end."""
        generator = torch.Generator().manual_seed(SEED)
        cache, start, seen = model.model.new_cache(), 0, 0
        warm = model.model.new_cache()
        for _ in range(WARM):
            self._read(model, warm, self._tokens(generator))
        warm.save(folder / "warm.ctx", model)  # what is imported for it is not the text's
        del warm
        for length in sorted(self.lengths):
            pieces: list[tuple[float, float]] = []  # CPU and wall seconds a token of each
            while seen < length:
                ids = self._tokens(generator)[:, : length - seen]
                self.machine.synchronize()
                cpu, wall = time.process_time(), time.perf_counter()
                self._read(model, cache, ids)
                self.machine.synchronize()
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                pieces.append((cpu / ids.shape[1], wall / ids.shape[1]))
                seen += ids.shape[1]
                report(ids.shape[1], f"{arm}: {seen:,} tokens")
            new, before = length - start, models.work(model, "prefill", max(start, 1), 0)
            work = models.work(model, "prefill", length, 0)
            flops = (work.flops - (before.flops if start else 0)) / new
            timing = Timing(*map(tuple, zip(*pieces, strict=True)))
            speed = self.sizes.batch / timing.seconds(self.machine.clock)
            extra = {"tokens_per_second": speed, "resident_bytes": resident_bytes()}
            work = Work(flops, work.nbytes / self.piece)
            path, start = folder / f"{length}.ctx", length
            cache.save(path, model)
            yield Measured(arm=arm, budget=None, timing=timing, work=work, extra=extra), path

    def _held(self, model: MeanbankForCausalLM, cache: MeanbankCache) -> Record:
        """Sizes and bytes; the peak is that of reading one more piece, the cache included."""
        ids, fresh = self._tokens(torch.Generator().manual_seed(SEED)), cache.repeat(1)
        peak = peak_bytes(lambda: self._read(model, fresh, ids), self.machine)
        return {
            **dataclasses.asdict(self.sizes),
            "piece": self.piece,
            "parameters": sum(p.numel() for p in model.parameters()),
            "state_bytes": cache.nbytes(),
            "peak_bytes": peak + cache.nbytes(),
        }

    def _record(self, measured: Measured, length: int, ceilings: Ceilings) -> list[Record]:
        common = {"bench": "soak", "phase": "prefill", "length": length, "dtype": self.dtype}
        return records_of(common, [measured], ceilings, self.machine)

    def _tokens(self, generator: torch.Generator) -> Tensor:
        shape = (self.sizes.batch, self.piece)
        ids = torch.randint(self.sizes.vocabulary, shape, generator=generator)
        return ids.to(self.machine.device)

    @staticmethod
    @torch.inference_mode()
    def _read(model: MeanbankForCausalLM, cache: MeanbankCache, ids: Tensor) -> None:
        model(ids, cache=cache, logits_to_keep=1)


def resident_bytes() -> int | None:
    """Memory that the process has in RAM; None where the system does not tell.

    What the C library has kept of freed memory is first given back, where it is glibc: how much
    that is depends on the order of sizes, and was seen to wander by 170 MiB while the bytes in use
    were the same after every piece.
    """
    path = Path("/proc/self/statm")
    if not path.exists():
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
