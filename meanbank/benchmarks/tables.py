"""Tables over token ids in memory, in a file, or in int8: bytes held, first call, decoding."""

import dataclasses
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanbank.benchmarks.ceilings import probes
from meanbank.benchmarks.limits import Work
from meanbank.benchmarks.model import ModelBenchmark, ModelSizes
from meanbank.benchmarks.records import Measured, Record, records_of
from meanbank.benchmarks.settings import DTYPES, SEED, Machine, check_positive
from meanbank.benchmarks.soak import resident_bytes
from meanbank.benchmarks.timing import Timing, alternate
from meanbank.core.config import choose
from meanbank.core.progress import progress
from meanbank.model import MeanbankCache, MeanbankConfig, MeanbankForCausalLM

# Arm -> the folder that is loaded, and its bank_storage.
LOADED = {
    "resident": ("float", "resident"),
    "mmap": ("float", "mmap"),
    "mmap-unfetched": ("float", "mmap"),
    "int8": ("int8", "int8"),
    "int8-mmap": ("int8", "mmap"),
}
ARMS = tuple(LOADED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesBenchmark:
    """What `meanbank bench tables` measures, on a model with random numbers in a temporary folder.

    Arms: "resident", tables as `transformers` loads any parameter (of a file in the model's own
    dtype it maps them, too, and reads far ahead); "mmap", only the rows of the tokens at hand;
    "mmap-unfetched", the same without asking for them before the first layer; "int8", in memory;
    "int8-mmap", int8 rows of a file. prompt: tokens of a call; decoded: tokens decoded after it.
    Four of `layers` = 6 layers have a bank; its rows are heads * value_head_dim wide.
    """

    machine: Machine = Machine()
    vocabulary: int = 32768
    hidden_size: int = 256
    layers: int = 6
    heads: int = 8
    value_head_dim: int = 128
    prompt: int = 256
    decoded: int = 64
    rounds: int = 3
    dtype: str = "float32"
    arms: tuple[str, ...] = ARMS

    def __post_init__(self) -> None:
        for arm in self.arms:
            choose("arm", arm, ARMS)
        choose("dtype", self.dtype, DTYPES)
        sizes = ("vocabulary", "hidden_size", "layers", "heads", "value_head_dim")
        for name in (*sizes, "prompt", "decoded", "rounds"):
            check_positive(name, getattr(self, name))

    def run(self) -> Iterator[Record]:
        """Yield the record of each arm; all of them take turns, and are loaded anew in each."""
        total = 1 + self.rounds * len(self.arms)
        with (
            tempfile.TemporaryDirectory() as folder,
            self.machine.settled(),
            progress("bench tables", total) as report,
        ):
            table_bytes = self._write(Path(folder))
            report(1, f"tables of {table_bytes['float'] / 2**20:,.0f} MiB written")
            probe = probes(self.machine, DTYPES[self.dtype])
            timings = alternate(probe.arms, self.machine, rounds=3, seconds=5.0)
            ceilings = probe.ceilings(timings, self.machine.clock)
            looks: dict[str, list[Look]] = {arm: [] for arm in self.arms}
            for number in range(self.rounds):
                for arm in self.arms:
                    looks[arm].append(self._look(arm, Path(folder), number))
                    report(1, f"round {number + 1}: {arm}")
            measured = [
                self._measured(arm, looks[arm], table_bytes[LOADED[arm][0]]) for arm in self.arms
            ]
            common = {"bench": "tables", "phase": "decode", "length": self.prompt}
            yield from records_of(
                {**common, "dtype": self.dtype}, measured, ceilings, self.machine, ("resident",)
            )

    def config(self) -> MeanbankConfig:
        return MeanbankConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            value_head_dim=self.value_head_dim,
            initialization="plain",
            plan=[{"memory": "kvm"}, {"where": "last_two_thirds", "values": "bank"}],
        )

    def _write(self, folder: Path) -> dict[str, int]:
        """Write both folders; returns bytes of tables in each."""
        torch.manual_seed(SEED)
        model: Any = MeanbankForCausalLM(self.config())
        model.to(DTYPES[self.dtype])
        model.save_pretrained(folder / "float")
        del model
        model = MeanbankForCausalLM.from_pretrained(folder / "float", bank_storage="int8")
        model.save_pretrained(folder / "int8")
        values = sum(table.shape.numel() for table in model.model.stored_tables)
        int8 = sum(table.resident_nbytes for table in model.model.stored_tables)
        return {"float": values * DTYPES[self.dtype].itemsize, "int8": int8}

    def _look(self, arm: str, folder: Path, number: int) -> "Look":
        """Load a model and use it for the first time."""
        name, storage = LOADED[arm]
        gc.collect()
        before = resident_bytes()
        forget_pages(folder / name)
        model: Any = MeanbankForCausalLM.from_pretrained(folder / name, bank_storage=storage)
        model.to(self.machine.device)
        if arm == "mmap-unfetched":
            model.model.stored_tables = ()
        read_other_weights(model)
        forgotten = forget_pages(folder / name)  # what of the tables came along
        generator = torch.Generator().manual_seed(SEED + number)
        ids = torch.randint(self.vocabulary, (1, self.prompt), generator=generator)
        ids = ids.to(self.machine.device)
        start = disk_bytes()
        first, _ = self._call(model, ids)
        stop = disk_bytes()
        read = None if start is None or stop is None else stop - start
        again, cache = self._call(model, ids)
        after = resident_bytes()
        held = None if before is None or after is None else after - before
        cpu, wall = self._decode(model, ids, cache)
        work = ModelBenchmark(sizes=ModelSizes(chunk_size=512)).work(
            model, "decode", self.prompt, cache.nbytes()
        )
        return Look(first if forgotten else None, again, read, held, cpu, wall, work)

    @torch.inference_mode()
    def _call(self, model: MeanbankForCausalLM, ids: Tensor) -> tuple[float, MeanbankCache]:
        """Wall seconds of reading the tokens into a new cache, and that."""
        self.machine.synchronize()
        began = time.perf_counter()
        cache: Any = model(ids, logits_to_keep=1).cache
        self.machine.synchronize()
        return time.perf_counter() - began, cache

    @torch.inference_mode()
    def _decode(
        self, model: MeanbankForCausalLM, ids: Tensor, cache: MeanbankCache
    ) -> tuple[float, float]:
        """CPU and wall seconds a token; tokens are those of the prompt, whose rows were read."""
        tokens = [ids[:, at % self.prompt, None] for at in range(self.decoded + 1)]
        model(tokens[0], cache=cache)  # a state that decoding left
        self.machine.synchronize()
        cpu, wall = time.process_time(), time.perf_counter()
        for token in tokens[1:]:
            model(token, cache=cache)
        self.machine.synchronize()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / self.decoded, wall / self.decoded

    def _measured(self, arm: str, looks: "list[Look]", table_bytes: int) -> Measured:
        timing = Timing(tuple(look.cpu for look in looks), tuple(look.wall for look in looks))
        extra = {
            "tokens_per_second": 1 / timing.seconds(self.machine.clock),
            "table_bytes": table_bytes,
            "read_bytes": _median([look.read for look in looks]),
            "resident_bytes": _median([look.held for look in looks]),
            "cold_seconds": _median([look.first for look in looks]),
            "warm_seconds": _median([look.again for look in looks]),
            "vocabulary": self.vocabulary,
            "row_width": self.heads * self.value_head_dim,
            "layers": self.layers,
        }
        return Measured(arm=arm, budget=None, timing=timing, work=looks[0].work, extra=extra)


@dataclasses.dataclass(frozen=True)
class Look:
    """One turn of an arm: wall seconds of the first call (None where the system cannot forget
    pages) and of the same again, bytes that the first had to read from the disk, bytes in memory
    since before the model was loaded, CPU and wall seconds a decoded token."""

    first: float | None
    again: float
    read: int | None
    held: int | None
    cpu: float
    wall: float
    work: Work


def forget_pages(folder: Path) -> bool:
    """Let the system drop what it holds of the files that nobody has mapped; whether it can."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # pages that are not on disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def read_other_weights(model: MeanbankForCausalLM) -> None:
    """Have all weights but tables in memory: a loaded parameter may be a mapped file as well."""
    tables = ("table", "shared_table")
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in tables:
            parameter.data = parameter.data.clone()


def disk_bytes() -> int | None:
    """What the process has had read from disks so far; None where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _median(values: list[Any]) -> Any:
    return None if None in values else statistics.median(values)
