"""`meanbank bench`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from meanbank.benchmarks import Machine, Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every benchmark.

    Args:
        threads: of PyTorch's operators. With one on a CPU, ratios are of the process's CPU time;
            else of wall time.
        device: cuda compares with FlashAttention.
        json: write each result to this new file, one JSON object a line, as it is measured.
        out: also draw a figure and write a CSV file, into this folder.
    """

    threads: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    json: Path | None = None
    out: Path | None = None

    def machine(self) -> Machine:
        """Where the benchmark runs."""
        from meanbank.benchmarks import Machine

        return Machine(device=self.device, threads=self.threads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """How long a cell is measured.

    Args:
        rounds: of all arms, at most; results are medians over them.
        seconds: no further round of a cell begins after so long, from the third on.
    """

    rounds: int = 7
    seconds: float = 10.0


Shared = Annotated[Common, tyro.conf.OmitArgPrefixes]
Patience = Annotated[Rounds, tyro.conf.OmitArgPrefixes]


def bench_kvm(
    phase: str = "prefill,backward,decode",
    lengths: str = "512,2048,8192",
    budget: str = "fixed,sqrt",
    dtype: str = "float32",
    arms: str = "ours,reference,sdpa,full",
    heads: int = 8,
    head_dim: int = 128,
    batch: int = 1,
    chunk_size: int = 256,
    layers: int = 24,
    patience: Patience = Rounds(),
    common: Shared = Common(),
) -> int:
    """Time the KVM operator against full attention: whole passes, backward, decode.

    Arms take turns in one process; the machine's ceilings are measured among them. A few minutes
    by default.

    Args:
        phase: names, separated by commas, of prefill, backward, decode.
        lengths: tokens: 512..32768 doubles from one to the other, 512,2048 are just those.
        budget: names of fixed (256 rows), sqrt (16·√N rows), saturating (at most 1024 rows).
        dtype: names of float32, bfloat16, float16.
        arms: names of ours (KVM's default backend), any of its backends such as reference (the
            specification), sdpa (PyTorch's attention), full (the best full attention in plain
            PyTorch).
        heads: of queries, keys and values.
        head_dim: channels a head.
        batch: sequences.
        chunk_size: tokens a block of KVM; its window has two.
        layers: states that decoding goes round, so that none is in a cache by luck.
    """
    from meanbank.benchmarks import (
        BUDGETS,
        DTYPES,
        Effort,
        KVMBenchmark,
        Sizes,
        parse_lengths,
        parse_names,
    )
    from meanbank.benchmarks.kvm import ARMS
    from meanbank.benchmarks.limits import PHASES

    benchmark = KVMBenchmark(
        machine=common.machine(),
        sizes=Sizes(
            batch=batch, heads=heads, head_dim=head_dim, chunk_size=chunk_size, layers=layers
        ),
        effort=Effort(rounds=patience.rounds, seconds=patience.seconds),
        phases=tuple(parse_names("phase", phase, PHASES)),
        lengths=tuple(parse_lengths(lengths)),
        budgets=tuple(parse_names("budget", budget, BUDGETS)),
        dtypes=tuple(parse_names("dtype", dtype, DTYPES)),
        arms=tuple(parse_names("arm", arms, ARMS)),
    )
    return _measure("kvm", benchmark, common)


def bench_bank(
    lengths: str = "2048,8192",
    memory: str = "full,sqrt",
    dtype: str = "float32",
    arms: str = "bank,cached,projected",
    heads: int = 8,
    head_dim: int = 128,
    batch: int = 1,
    chunk_size: int = 256,
    layers: int = 24,
    vocabulary: int = 32768,
    patience: Patience = Rounds(),
    common: Shared = Common(),
) -> int:
    """Time the whole decode step of a bank layer: ids stored, against values cached.

    Args:
        lengths: tokens: 512..32768 doubles from one to the other, 512,2048 are just those.
        memory: names of full (attention), and of KVM's budgets fixed, sqrt, saturating.
        dtype: names of float32, bfloat16, float16.
        arms: names of bank (ids in the state), cached (the same with values in the state),
            projected (a value projection instead).
        heads: of queries, keys and values.
        head_dim: channels a head.
        batch: sequences.
        chunk_size: tokens a block of KVM; its window has two.
        layers: that decoding goes round, each with weights and a table of its own.
        vocabulary: rows of a table.
    """
    from meanbank.benchmarks import DTYPES, Effort, Sizes, parse_lengths, parse_names
    from meanbank.benchmarks.bank import ARMS, MEMORIES, BankBenchmark

    benchmark = BankBenchmark(
        machine=common.machine(),
        sizes=Sizes(
            batch=batch, heads=heads, head_dim=head_dim, chunk_size=chunk_size, layers=layers
        ),
        effort=Effort(rounds=patience.rounds, seconds=patience.seconds),
        lengths=tuple(parse_lengths(lengths)),
        memories=tuple(parse_names("memory", memory, MEMORIES)),
        dtypes=tuple(parse_names("dtype", dtype, DTYPES)),
        arms=tuple(parse_names("arm", arms, ARMS)),
        vocabulary=vocabulary,
    )
    return _measure("bank", benchmark, common)


def bench_trajectory(
    tokens: int = 8192,
    budget: str = "fixed,sqrt",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    arms: str = "ours,sdpa,full",
    heads: int = 8,
    head_dim: int = 128,
    batch: int = 1,
    chunk_size: int = 256,
    common: Shared = Common(),
) -> int:
    """Time every generated token, from the second on, of one layer.

    Args:
        tokens: to generate; the paper's series has 32768.
        budget: names of fixed, sqrt, saturating.
        dtype: of all tensors.
        arms: names as for bench kvm.
        heads: of queries, keys and values.
        head_dim: channels a head.
        batch: sequences.
        chunk_size: tokens a block of KVM; its window has two.
    """
    from meanbank.benchmarks import BUDGETS, Sizes, parse_names
    from meanbank.benchmarks.kvm import ARMS
    from meanbank.benchmarks.trajectory import TrajectoryBenchmark

    benchmark = TrajectoryBenchmark(
        machine=common.machine(),
        sizes=Sizes(batch=batch, heads=heads, head_dim=head_dim, chunk_size=chunk_size),
        tokens=tokens,
        budgets=tuple(parse_names("budget", budget, BUDGETS)),
        dtype=dtype,
        arms=tuple(parse_names("arm", arms, ARMS)),
    )
    try:
        return _measure("trajectory", benchmark, common, tables=("trajectory-tokens.csv",))
    finally:
        if common.out is not None and any(benchmark.times.values()):
            from meanbank.core.files import write_text

            write_text(common.out / "trajectory-tokens.csv", benchmark.csv())


def bench_model(
    phase: str = "training,prefill,decode",
    lengths: str = "1024,8192",
    dtype: str = "float32",
    models: str = "full,fixed,sqrt,full+bank,fixed+bank,sqrt+bank",
    backbone: str = "gptalpha2",
    batch: int = 1,
    hidden_size: int = 256,
    layers: int = 8,
    heads: int = 4,
    vocabulary: int = 8192,
    chunk_size: int = 256,
    patience: Patience = Rounds(),
    common: Shared = Common(),
) -> int:
    """Tokens a second and peak memory of whole models, in training and in serving.

    About 10M parameters by default, and a quarter of an hour.

    Args:
        phase: names of training (forward, backward and AdamW), passes (forward and backward, beside
            the matrix products that they are made of by themselves; on a CPU), prefill, decode.
        lengths: tokens: of a training sequence, of a prompt, and before the decoded tokens.
        dtype: names of float32, bfloat16, float16.
        models: names of full, fixed, sqrt, saturating; each with +bank has a bank in the last
            third of its layers.
        backbone: gptalpha2 or nanochat.
        batch: sequences.
        hidden_size: width of the models.
        layers: of the models.
        heads: of the models.
        vocabulary: token ids.
        chunk_size: tokens a block of KVM; its window has two.
    """
    from meanbank.benchmarks import DTYPES, Effort, parse_lengths, parse_names
    from meanbank.benchmarks.model import ARMS, PHASES, ModelBenchmark, ModelSizes

    benchmark = ModelBenchmark(
        machine=common.machine(),
        sizes=ModelSizes(
            backbone=backbone,
            batch=batch,
            vocabulary=vocabulary,
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            chunk_size=chunk_size,
        ),
        effort=Effort(rounds=patience.rounds, seconds=patience.seconds),
        phases=tuple(parse_names("phase", phase, PHASES)),
        lengths=tuple(parse_lengths(lengths)),
        dtypes=tuple(parse_names("dtype", dtype, DTYPES)),
        arms=tuple(parse_names("model", models, ARMS)),
    )
    return _measure("model", benchmark, common)


def bench_soak(
    lengths: str = "8192,65536,524288",
    dtype: str = "float32",
    models: str = "fixed,sqrt",
    piece: int = 2048,
    batch: int = 1,
    hidden_size: int = 256,
    layers: int = 8,
    heads: int = 4,
    vocabulary: int = 8192,
    chunk_size: int = 256,
    common: Shared = Common(),
) -> int:
    """Read a long text piece by piece: speed, bytes held and peak as it gets longer.

    Args:
        lengths: tokens after which to look: 8192..524288 doubles from one to the other.
        dtype: float32, bfloat16 or float16.
        models: names of full, fixed, sqrt, saturating; each with +bank has a bank in the last
            third of its layers.
        piece: tokens read at a time.
        batch: sequences.
        hidden_size: width of the models.
        layers: of the models.
        heads: of the models.
        vocabulary: token ids.
        chunk_size: tokens a block of KVM; its window has two.
    """
    from meanbank.benchmarks import parse_lengths, parse_names
    from meanbank.benchmarks.model import ARMS, ModelSizes
    from meanbank.benchmarks.soak import SoakBenchmark

    benchmark = SoakBenchmark(
        machine=common.machine(),
        sizes=ModelSizes(
            batch=batch,
            vocabulary=vocabulary,
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            chunk_size=chunk_size,
        ),
        lengths=tuple(parse_lengths(lengths)),
        piece=piece,
        dtype=dtype,
        arms=tuple(parse_names("model", models, ARMS)),
    )
    return _measure("soak", benchmark, common)


def bench_tables(
    arms: str = "resident,mmap,mmap-unfetched,int8,int8-mmap",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    prompt: int = 256,
    decoded: int = 64,
    vocabulary: int = 32768,
    hidden_size: int = 256,
    layers: int = 6,
    heads: int = 8,
    value_head_dim: int = 128,
    rounds: int = 3,
    common: Shared = Common(),
) -> int:
    """Where a bank's tables are: memory held, the first call and the next one, decoding.

    Writes a model of random numbers and its int8 copy into a temporary folder (TMPDIR says where;
    0.8 GB by default), loads it in each way, and lets the system forget the file before the first
    call, which therefore reads from the disk. About a minute by default.

    Args:
        arms: names of resident (parameters, which transformers maps as well where it can), mmap
            (rows of a file), mmap-unfetched (the same, not asked for before the first layer), int8
            (in memory), int8-mmap (int8 rows of a file).
        dtype: of the model and its file.
        prompt: tokens of the calls, drawn evenly from the vocabulary.
        decoded: tokens decoded after them.
        vocabulary: rows of a table.
        hidden_size: width of the model.
        layers: of the model, the last two thirds of them with a table each.
        heads: of queries, keys and values.
        value_head_dim: numbers a head of a table's row.
        rounds: of all arms; results are medians over them.
    """
    from meanbank.benchmarks import parse_names
    from meanbank.benchmarks.tables import ARMS, TablesBenchmark

    benchmark = TablesBenchmark(
        machine=common.machine(),
        vocabulary=vocabulary,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        value_head_dim=value_head_dim,
        prompt=prompt,
        decoded=decoded,
        rounds=rounds,
        dtype=dtype,
        arms=tuple(parse_names("arm", arms, ARMS)),
    )
    return _measure("tables", benchmark, common)


def bench_show(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    markdown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    out: Path | None = None,
) -> int:
    """Show the tables of results that were written with --json.

    Args:
        files: JSON-lines files.
        markdown: as text for a README.
        out: also draw the figure and write a CSV file, into this folder.
    """
    from meanbank.reports import benchmark_tables, load_records
    from meanbank.reports import markdown as as_markdown

    if not files:
        raise ValueError("give at least one file that a benchmark has written with --json")
    records = load_records(files)
    _check_free(out, "bench")
    if markdown:
        print("\n".join(as_markdown(table) for table in benchmark_tables(records)))
    else:
        _show(records)
    _draw(records, out, "bench")
    return 0


BENCH = {
    "kvm": bench_kvm,
    "bank": bench_bank,
    "trajectory": bench_trajectory,
    "model": bench_model,
    "soak": bench_soak,
    "tables": bench_tables,
    "show": bench_show,
}


def _measure(name: str, benchmark: Any, common: Common, tables: tuple[str, ...] = ()) -> int:
    """Run a benchmark, keep each result at once, and show all of them, also after Ctrl-C."""
    from meanbank.benchmarks import json_lines, write

    _check_free(common.out, name, tables)
    records: list[Record] = []
    with json_lines(common.json) as file:
        try:
            results: Iterator[Record] = benchmark.run()
            for record in results:
                records.append(record)
                write(file, record)
        except KeyboardInterrupt:
            if records:
                print("stopped; this is what had been measured:", file=sys.stderr)
                _show(records)
                _draw(records, common.out, name)
            raise
    _show(records)
    _draw(records, common.out, name)
    return 0


def _show(records: list[Record]) -> None:
    from meanbank.reports import benchmark_tables, print_table

    told = set()
    for table in benchmark_tables(records):
        print_table(table, meaning=table.meaning not in told)  # the same words once
        told.add(table.meaning)
    by = records[-1]["produced_by"]
    threads = f"{by['threads']} thread{'s' if by['threads'] > 1 else ''}"
    print(
        f"{by['machine']}, {threads}, PyTorch {by['torch']}, meanbank {by['version']} "
        f"({by['commit'] or 'no checkout'})"
    )
    rates = {}
    for record in records:
        rates.setdefault(record["dtype"], []).append(record)
    for dtype, found in rates.items():
        flops = max(record["ceiling_flops_per_second"] for record in found)
        read = max(record["ceiling_bytes_per_second"] for record in found)
        print(f"ceilings: {flops / 1e9:,.0f} GFLOP/s in {dtype}, {read / 1e9:,.0f} GB/s read")


def _check_free(out: Path | None, name: str, tables: tuple[str, ...] = ()) -> None:
    """Raise ValueError where a file would be overwritten."""
    for file in (f"{name}.png", f"{name}.csv", *tables):
        if out is not None and (out / file).exists():
            raise ValueError(f"{out / file} exists already; give another --out or remove it")


def _draw(records: list[Record], out: Path | None, name: str) -> None:
    if out is None:
        return
    from meanbank.core.files import write_text
    from meanbank.reports import csv, draw_benchmark

    write_text(out / f"{name}.csv", csv(records))
    draw_benchmark(records, out / f"{name}.png")
    print(f"written: {out / name}.png, {out / name}.csv")
