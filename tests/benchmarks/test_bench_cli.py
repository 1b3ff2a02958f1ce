"""`meanbank bench` as a user meets it; parsing, tables and what is derived from times."""

import io
import json

import pytest
from rich.console import Console

from meanbank.benchmarks import Effort, Machine, parse_lengths, parse_names
from meanbank.benchmarks.ceilings import Ceilings
from meanbank.benchmarks.kvm import KVMBenchmark
from meanbank.benchmarks.limits import Work
from meanbank.benchmarks.records import Measured, records_of
from meanbank.benchmarks.timing import Arm, Timing, alternate
from meanbank.benchmarks.trajectory import stretches
from meanbank.cli import main
from meanbank.reports import (
    benchmark_tables,
    first_faster,
    growth_exponent,
    markdown,
    print_table,
)
from meanbank.reports.benchmarks import seconds

TINY = ("--heads", "2", "--head-dim", "8", "--chunk-size", "8")
QUICK = ("--rounds", "1", "--seconds", "0.01")
FIELDS = {
    "phase",
    "budget",
    "length",
    "dtype",
    "arm",
    "cpu_seconds",
    "wall_seconds",
    "ratio_to_sdpa",
    "share_of_limit",
    "produced_by",
}


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """Ceilings of tiny work, and no repetitions for the clock's sake."""
    from meanbank.benchmarks import bank, ceilings, kvm, model, soak, tables, timing, trajectory

    def probes(machine, dtype):
        return ceilings.probes(machine, dtype, side=8, nbytes=4096)

    for module in (bank, kvm, model, soak, tables, trajectory):
        monkeypatch.setattr(module, "probes", probes)
    monkeypatch.setitem(timing.alternate.__kwdefaults__, "least_seconds", 0.0)
    monkeypatch.setattr("meanbank.benchmarks.full_decode.TRIAL_BYTES", 2**12)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    return stop.value.code or 0


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kvm(tmp_path, capsys):
    out = ("--json", str(tmp_path / "new" / "kvm.jsonl"), "--out", str(tmp_path))
    options = ("--lengths", "16..32", "--dtype", "float32,bfloat16", "--layers", "1")
    options += ("--budget", "sqrt")
    assert run("kvm", *TINY, *QUICK, *options, *out) == 0
    records = lines(tmp_path / "new" / "kvm.jsonl")
    assert len(records) == 2 * 3 * 2 * 4  # dtypes, phases, lengths, arms
    for record in records:
        assert record.keys() >= FIELDS
        assert record["seconds"] > 0
        assert record["produced_by"].keys() >= {"version", "commit", "torch", "threads", "machine"}
        assert ("peak_bytes" in record) == (record["phase"] == "backward")
        assert ("state_bytes" in record) == (record["phase"] == "decode")
        if record["arm"] == "sdpa":
            assert record["ratio_to_sdpa"] == 1
    shown = capsys.readouterr().out
    assert "prefill, bfloat16" in shown
    assert "× SDPA" in shown
    assert shown.count("how many times faster than") == 1
    assert "GFLOP/s in bfloat16" in shown
    assert (tmp_path / "kvm.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "kvm.csv").read_text().splitlines()
    assert len(table) == 1 + len(records)
    assert table[0].startswith("bench,phase,length,dtype,budget,arm,cpu_seconds")

    before = (tmp_path / "new" / "kvm.jsonl").read_bytes()
    for option, message in (
        (out[:2], "kvm.jsonl exists already"),
        (out[2:], "kvm.png exists already"),
    ):
        assert run("kvm", *TINY, *QUICK, *options, *option) == 2
        errors = capsys.readouterr().err.splitlines()
        assert message in errors[-1]
    assert (tmp_path / "new" / "kvm.jsonl").read_bytes() == before

    shown_folder = tmp_path / "shown"
    assert run("show", str(tmp_path / "new" / "kvm.jsonl"), "--markdown") == 0
    assert "| Arm | 16 | 32 |" in capsys.readouterr().out
    assert run("show", str(tmp_path / "new" / "kvm.jsonl"), "--out", str(shown_folder)) == 0
    assert (shown_folder / "bench.png").exists()


def test_bank_trajectory_and_model(tmp_path, capsys):
    file = {name: tmp_path / f"{name}.jsonl" for name in ("bank", "trajectory", "model")}
    small = ("--vocabulary", "40", "--layers", "2", "--lengths", "16")
    common = ("--json", str(file["bank"]), "--out", str(tmp_path))
    assert run("bank", *TINY, *QUICK, *small, *common) == 0
    records = lines(file["bank"])
    assert [(r["budget"], r["arm"]) for r in records] == [
        (memory, arm) for memory in ("full", "sqrt") for arm in ("bank", "cached", "projected")
    ]
    assert all(record.keys() >= FIELDS for record in records)
    assert all(r["ratio_to_cached"] == 1 for r in records if r["arm"] == "cached")

    common = ("--json", str(file["trajectory"]), "--out", str(tmp_path))
    assert run("trajectory", *TINY, "--tokens", "20", *common) == 0
    records = lines(file["trajectory"])
    assert all(record.keys() >= FIELDS for record in records)
    assert {record["length"] for record in records} == {stop for _, stop in stretches(20)}
    assert len((tmp_path / "trajectory-tokens.csv").read_text().splitlines()) == 21

    sizes = ("--hidden-size", "16", "--heads", "2", "--chunk-size", "4")
    common = ("--json", str(file["model"]), "--out", str(tmp_path))
    models = ("--models", "full,sqrt+bank")
    assert run("model", *small, *sizes, *models, *QUICK, *common) == 0
    records = lines(file["model"])
    assert [(r["phase"], r["arm"]) for r in records] == [
        (p, arm) for p in ("training", "prefill", "decode") for arm in ("full", "sqrt+bank")
    ]
    for record in records:
        assert record.keys() >= FIELDS
        assert record["tokens_per_second"] > 0
        assert record["peak_bytes"] > 0
        assert ("state_bytes" in record) == (record["phase"] == "decode")
    capsys.readouterr()
    assert run("show", *map(str, file.values())) == 0
    shown = capsys.readouterr().out
    for words in ("whole bank layer", "Trajectory: decode", "Whole models: training", "+ bank"):
        assert words in shown


def test_passes_and_their_products(tmp_path, capsys):
    file = tmp_path / "passes.jsonl"
    sizes = ("--hidden-size", "16", "--heads", "2", "--chunk-size", "4", "--layers", "3")
    sizes = (*sizes, "--vocabulary", "40", "--lengths", "16", "--backbone", "nanochat")
    models = ("--models", "full,sqrt+bank", "--phase", "passes")
    out = ("--json", str(file), "--out", str(tmp_path / "out"))
    assert run("model", *sizes, *models, *QUICK, *out) == 0
    assert [*(tmp_path / "out").glob("*.png")]
    records = lines(file)
    assert [(r["phase"], r["arm"]) for r in records] == [
        ("passes", "full"),
        ("passes", "sqrt+bank"),
    ]
    for record in records:
        assert record.keys() >= FIELDS
        assert record["backbone"] == "nanochat"
        assert record["share_of_products"] == record["product_seconds"] / record["seconds"]
    # One block of queries holds all 16, so attention multiplies what the count leaves out: keys
    # that come later, in each of 3 layers and 2 heads of 8 channels, and 6 products in all.
    later = 3 * 2 * (16 * 16 - 16 * 17 // 2) * 8 * 2 * 6
    assert records[0]["product_flops"] == records[0]["flops"] + later
    capsys.readouterr()
    assert run("show", str(file)) == 0
    shown = capsys.readouterr().out
    assert "Whole models: passes, float32, nanochat" in shown
    assert "Products" in shown


def test_soak(tmp_path, capsys):
    path, small = tmp_path / "soak.jsonl", ("--vocabulary", "40", "--layers", "2", "--piece", "8")
    sizes = ("--hidden-size", "16", "--heads", "2", "--chunk-size", "4")
    common = ("--json", str(path), "--out", str(tmp_path))
    assert (
        run(
            "soak",
            "--lengths",
            "1096,1200,2000",
            "--models",
            "fixed,full+bank",
            *small,
            *sizes,
            *common,
        )
        == 0
    )
    records = lines(path)
    assert [(r["arm"], r["length"]) for r in records] == [
        (arm, length) for arm in ("fixed", "full+bank") for length in (1096, 1200, 2000)
    ]
    assert all(record.keys() >= FIELDS for record in records)
    held = [[r[f"{name}_bytes"] for r in records] for name in ("state", "peak")]
    for numbers in held:
        assert len(set(numbers[:3])) == 1  # a fixed memory that is full
        assert numbers[3:] == sorted(set(numbers[3:]))
    capsys.readouterr()
    assert run("show", str(path)) == 0
    assert "A long text, 8 tokens at a time" in capsys.readouterr().out


def test_tables(tmp_path, capsys):
    path, rounds = tmp_path / "tables.jsonl", ("--rounds", "1", "--prompt", "5", "--decoded", "2")
    sizes = ("--vocabulary", "40", "--hidden-size", "16", "--layers", "3", "--heads", "2")
    common = ("--json", str(path), "--out", str(tmp_path / "out"), "--value-head-dim", "4")
    assert run("tables", *rounds, *sizes, *common) == 0
    records = {record["arm"]: record for record in lines(path)}
    assert list(records) == ["resident", "mmap", "mmap-unfetched", "int8", "int8-mmap"]
    assert all(record.keys() >= FIELDS - {"ratio_to_sdpa"} for record in records.values())
    assert records["mmap"]["table_bytes"] == 2 * 40 * 8 * 4
    assert records["int8-mmap"]["table_bytes"] == 2 * 40 * (8 + 2 * 4)
    assert all(record["warm_seconds"] > 0 for record in records.values())
    capsys.readouterr()
    assert run("show", str(path)) == 0
    assert "int8 rows of a mapped file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tables", "--arms", "mmapped"], "unknown arm 'mmapped'; choose one of mmap"),
        (["tables", "--rounds", "0"], "rounds must be positive"),
        (["soak", "--piece", "0"], "piece must be positive"),
        (["soak", "--dtype", "int8"], "unknown dtype 'int8'; choose one of"),
        (["kvm", "--lengths", "512.."], "is not a positive number of tokens"),
        (["kvm", "--lengths", "1024..512"], "ends before it begins"),
        (["kvm", "--lengths", "0"], "is not a positive number of tokens"),
        (["kvm", "--lengths", ","], "no lengths are given"),
        (["kvm", "--budget", "sqr"], "unknown budget 'sqr'; choose one of sqrt"),
        (["kvm", "--phase", "decod"], "unknown phase 'decod'; choose one of decode"),
        (["kvm", "--dtype", "float16,int8"], "unknown dtype 'int8'; choose one of"),
        (["kvm", "--arms", "flash"], "unknown arm 'flash'; choose one of"),
        (["kvm", "--heads", "0"], "heads must be positive"),
        (["kvm", "--head-dim", "6"], "head_dim must be a multiple of 4"),
        (["kvm", "--threads", "0"], "threads must be positive"),
        (["kvm", "--seconds", "0"], "seconds must be positive"),
        (["kvm", "--layers", "1000000", "--lengths", "1000000"], "give fewer --layers"),
        (["kvm", "--device", "cuda"], "no GPU"),
        (["bank", "--memory", "ful"], "unknown memory 'ful'; choose one of full"),
        (["bank", "--vocabulary", "0"], "vocabulary must be positive"),
        (["trajectory", "--tokens", "1"], "tokens must be at least 2"),
        (["model", "--models", "full+bnk"], "unknown model 'full+bnk'; choose one of full+bank"),
        (["model", "--hidden-size", "0"], "hidden_size must be positive"),
        (["show", "missing.jsonl"], "there is no file missing.jsonl"),
        (["show", "EMPTY"], "no benchmark records"),
        (["show"], "at least one file"),
        (["kmv"], "kmv"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    new = tmp_path / "new.jsonl"
    given = [str(empty) if word == "EMPTY" else word for word in arguments]
    extra = [] if arguments[0] in ("show", "kmv") else ["--json", str(new)]
    assert run(*given, *extra) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert errors[0].startswith("meanbank: error: ")
    assert not new.exists()


def test_an_interrupted_benchmark_keeps_what_it_has_measured(tmp_path, capsys, monkeypatch):
    cell = KVMBenchmark.cell

    def interrupted(self, dtype, phase, length):
        if length == 32:
            raise KeyboardInterrupt
        return cell(self, dtype, phase, length)

    monkeypatch.setattr(KVMBenchmark, "cell", interrupted)
    path = tmp_path / "kvm.jsonl"
    options = ("--lengths", "16,32", "--phase", "prefill", "--json", str(path))
    assert run("kvm", *TINY, *QUICK, *options) == 130
    assert len(lines(path)) == 6
    shown, errors = capsys.readouterr()
    assert "prefill, float32" in shown
    assert "this is what had been measured" in errors


def test_lengths_and_names():
    assert parse_lengths("512..4096") == [512, 1024, 2048, 4096]
    assert parse_lengths("512..3000") == [512, 1024, 2048]
    assert parse_lengths(" 2048, 512,512 ") == [512, 2048]
    assert parse_lengths("8..32,100") == [8, 16, 32, 100]
    assert parse_names("budget", "sqrt, fixed,sqrt", ["fixed", "sqrt"]) == ["sqrt", "fixed"]
    with pytest.raises(ValueError, match="choose from a, b"):
        parse_names("letter", " , ", ["a", "b"])


def test_growth_exponent():
    for exponent in (0.0, 0.5, 1.0, 2.0):
        points = {n: 3e-6 * n**exponent for n in (512, 4096, 8192, 65536)}
        points[512] = 1.0  # the fixed costs of short lengths do not count
        assert growth_exponent(points) == pytest.approx(exponent, abs=1e-9)
    assert growth_exponent({512: 1.0, 1024: 2.0, 2048: 8.0}) == pytest.approx(2.0)
    assert growth_exponent({512: 1.0}) is None


def test_first_faster_length():
    baseline = {512: 1.0, 1024: 2.0, 2048: 4.0, 4096: 8.0}
    assert first_faster({512: 2.0, 1024: 2.0, 2048: 3.0, 4096: 5.0}, baseline) == 2048
    # faster by luck, once, is not faster from there on
    assert first_faster({512: 0.5, 1024: 3.0, 2048: 3.0, 4096: 5.0}, baseline) == 2048
    assert first_faster({512: 0.5, 1024: 1.0}, baseline) == 512
    assert first_faster({512: 0.5, 4096: 9.0}, baseline) is None
    assert first_faster({}, baseline) is None


def test_arms_take_turns():
    calls = []
    arms = {
        name: Arm(
            prepare=lambda name=name: calls.append(f"prepare {name}"),
            run=lambda _, name=name: calls.append(name),
            steps=2,
        )
        for name in "ab"
    }
    with Machine().settled():
        timings = alternate(arms, Machine(), rounds=2, seconds=60)
    turn = ["prepare a", "a", "prepare b", "b"]
    assert calls == turn * 3  # one of them untimed
    assert all(len(timing.cpu) == len(timing.wall) == 2 for timing in timings.values())
    calls.clear()
    with Machine().settled():
        alternate(arms, Machine(), rounds=9, seconds=0, warm_up=False)
    assert calls == turn * 3  # the least number of rounds


def test_records_of_known_times():
    ceilings = Ceilings(flops_per_second=100.0, bytes_per_second=10.0)
    assert ceilings.seconds(50, 1) == (0.5, "flops")
    assert ceilings.seconds(50, 20) == (2.0, "bytes")
    measured = [
        Measured(
            arm=arm,
            budget=budget,
            timing=Timing((took, 3 * took, took), (1.0, 1.0, 1.0)),
            work=Work(50.0, 1.0),
        )
        for arm, budget, took in (("sdpa", None, 4.0), ("ours", "sqrt", 1.0))
    ]
    common = {"bench": "kvm", "phase": "prefill", "length": 8, "dtype": "float32"}
    slow, fast = records_of(common, measured, ceilings, Machine())
    assert (slow["ratio_to_sdpa"], fast["ratio_to_sdpa"]) == (1.0, 4.0)
    assert fast["ratio_to_full"] is None
    assert fast["share_of_limit"] == 0.5
    assert fast["cpu_seconds"] == fast["seconds"] == 1.0
    assert fast["spread"] == 1.0  # quartiles 1 and 2
    (slow, fast) = records_of(common, measured, ceilings, Machine(threads=2))
    assert fast["clock"] == "wall"
    assert fast["ratio_to_sdpa"] == 1.0

    tables = benchmark_tables([slow, fast])
    console = Console(file=io.StringIO(), width=100)
    print_table(tables[1], console, meaning=True)
    assert "KVM, 16·√N rows" in console.file.getvalue()  # pyright: ignore
    assert markdown(tables[0]).splitlines()[2] == "| Arm | 8 |"


def test_stretches_cover_every_token_from_the_second_on():
    for tokens in (2, 3, 20, 1000):
        parts = stretches(tokens)
        covered = [at for start, stop in parts for at in range(start, stop)]
        assert covered == list(range(1, tokens))


def test_effort_and_times_in_words():
    with pytest.raises(ValueError, match="rounds must be positive, got 0"):
        Effort(rounds=0)
    assert [seconds(t) for t in (2.0, 0.0123, 4.5e-6, None)] == [
        "2.00 s",
        "12.3 ms",
        "4.50 µs",
        "–",
    ]
