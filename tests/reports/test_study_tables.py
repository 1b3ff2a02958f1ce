import io
from pathlib import Path

import pytest
from rich.console import Console

from meanbank.reports import print_table
from meanbank.reports.study import load_study, study_tables
from meanbank.reports.study.statistics import estimate
from meanbank.reports.study.tables import arms_table, memory_statistics, score_tables
from meanbank.reports.tables import Row, Table
from tests.reports.study_files import write_json, write_lines


def rows(table: Table) -> dict[str, tuple[str, ...]]:
    return {row.cells[0].split("\n")[0]: row.cells[1:] for row in table.rows}


def one_group(folder: Path, jobs: list[dict]) -> Path:
    """A study of the arms a and b with these lines of results."""
    plan = {"seeds": [1, 2], "groups": {"g": {"arms": {"a": {"label": "A"}, "b": {}}}}}
    write_json(folder / "study.yaml", plan)
    write_lines(folder / "results.jsonl", [{"group": "g", **job} for job in jobs])
    return folder


def test_arms(study: Path) -> None:
    recall, *_ = load_study(study).groups
    table = rows(arms_table(recall))
    full = ("1.23M", "1.23M", "12.0 TFLOP", "128 MiB", "4.00 GiB")
    assert table["Full attention"][:5] == full and table["Full attention"][6] == "11, 12, 13"
    fixed = table["KVM, 8 rows"]
    assert fixed[3:5] == ("768 KiB", "768 KiB"), "(128 + 64) x 4096 bytes whatever the context"
    assert table["KVM, 4·sqrt(N) rows, no gate"][6] == "11, 12"


def test_scores_with_the_interval_by_hand(tmp_path: Path) -> None:
    jobs = [
        {"arm": "a", "seed": 1, "scores": {"bpb": 1.0, "recall@64/4": 0.5}},
        {"arm": "a", "seed": 2, "scores": {"bpb": 2.0}},
        {"arm": "a", "seed": 9, "tuning": True, "scores": {"bpb": 100.0}},
    ]
    alone, recall = score_tables(load_study(one_group(tmp_path, jobs)).groups[0])
    # Deviation sqrt(1/2), standard error 1/2; the t quantile of one degree of freedom is 12.706.
    assert rows(alone) == {"A": ("1.500 ± 6.353\n1.000, 2.000",), "b": ("–",)}
    assert recall.columns == ("Arm", "64/4") and rows(recall)["A"] == ("0.500\n1 seed",)


def test_scores_of_memories_are_only_in_the_table_of_arms(study: Path) -> None:
    titles = [table.title for table in score_tables(load_study(study).groups[0])]
    assert titles == ["Scores: mqar", "Scores: recall"]


def test_estimates() -> None:
    assert estimate([]) is None
    found = estimate([1.0, 2.0, 3.0])
    assert found and found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


def test_claims(study: Path) -> None:
    claims = study_tables(study)[0]
    growing, bank, gate, needle, unmeasured = claims.rows
    assert growing.cells == (
        "A growing memory recalls more than a fixed one beyond its capacity (512 tokens, 48 "
        "pairs).\nSource: KVM, table 3",
        "✓ holds\nexpected: holds",
        "0.556\n0.540, 0.556, 0.572\ntuning: 0.610",
        "0.510 to 0.602\nt over seeds, 95 %\nbootstrap: 0.530 to 0.580",
        "≥ 0.300",
        "0.002\nraw: <\N{NO-BREAK SPACE}0.001",
    )
    assert bank.cells[0].endswith("Note: Added after results existed.")
    assert bank.cells[2:5] == (
        "-0.0061\n-0.0031, -0.0066, -0.0086",
        "-0.0127 to 0.0005\nt over seeds, 95 %",
        "≤ -0.0040",
    )
    assert [row.tone for row in claims.rows] == ["good", "open", "bad", "open", ""]
    assert gate.cells[1] == "✗ does not hold" and needle.cells[1].startswith("? undecided")
    assert unmeasured.cells[1:] == (
        "– not measured\nexpected: holds",
        "–",
        "–",
        "≤ -0.0040",
        "–",
    )


def test_memory_statistics_are_means_over_seeds_and_heads(study: Path) -> None:
    (table,) = memory_statistics(load_study(study).groups[0])
    assert table.columns[:5] == ("Arm", "Layer", "rows", "budget", "appended")
    first = dict(zip(table.columns, table.rows[0].cells, strict=True))
    assert (first["Arm"], first["Layer"], first["rows"]) == ("KVM, 8 rows", "1", "65")
    assert first["merge\nsimilarity"] == "0.730" and first["temperature"] == "1.200"


def test_a_study_without_results_is_dashes(tmp_path: Path) -> None:
    write_json(tmp_path / "study.yaml", {"seeds": [1, 2], "groups": {"g": {"arms": {"a": {}}}}})
    arms, absent = study_tables(tmp_path)
    assert set(arms.rows[0].cells[1:]) == {"–"}
    assert absent.rows[0].cells == ("g", "a", "1 and 2", "was not run")


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_table_fits_a_terminal(study: Path) -> None:
    for table in study_tables(study):
        text = printed(table)
        assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100
        last = table.rows[-1].cells[-1].partition("\n")[0]
        assert last in text, "numbers are whole"
        assert all(len(row.cells) == len(table.columns) for row in table.rows)


def test_prints_to_standard_output(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(study_tables(study)[0], meaning=True)
    text = capsys.readouterr().out
    assert "✓ holds" in text and "A claim holds when" in text


def test_names_are_not_markup_and_many_numbers_go_below_one_another() -> None:
    cells = ("Full [red]x[/red]", *(f"0.{n:03}" for n in range(24)))
    table = Table(title="T", meaning=(), columns=cells, rows=(Row(cells=cells),))
    text = printed(table)
    assert "Full [red]x[/red]" in text and "0.023" in text
    assert sum("Full [red]" in line for line in text.splitlines()) == 6, (
        "heading and row, three times"
    )
