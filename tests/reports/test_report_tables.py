import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from meanbank.reports import demo_tables, load_demo, print_tables
from meanbank.reports.tables import contrast_table, language_table, recall_table
from meanbank.reports.wording import binary_size, length, printable, rate, short_count
from tests.reports.report_files import write_evaluation, write_json


def printed(folder: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_tables(load_demo(folder), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_language_values(demo: Path) -> None:
    rows = {row.cells[0]: row.cells[1:] for row in language_table(load_demo(demo)).rows}
    full = ("1.23M", "1.712", "3.121", "3.266", "3.586", "3.920", "128 MiB", "4.00 GiB", "61.5")
    assert rows["Full attention"] == full
    assert rows["KVM, 4·sqrt(N) rows + bank"][-3:] == ("3.33 MiB", "16.5 MiB", "65.5")
    assert rows["Bigram baseline"] == ("–", "2.345", *"–" * 7)


def test_recall_values_and_means(demo: Path) -> None:
    rows = [row.cells for row in recall_table(load_demo(demo)).rows]
    assert rows[3] == ("KVM, 8 rows", "0", "0.761", "0.725", "0.686", "0.606", "0.354")
    assert rows[5] == ("KVM, 8 rows", "mean", "0.751", "0.715", "0.676", "0.596", "0.344")


def test_contrast_is_taken_seed_by_seed(demo: Path) -> None:
    shutil.rmtree(demo / "recall" / "kvm_fixed-seed1")
    rows = [row.cells for row in contrast_table(load_demo(demo)).rows]
    assert rows == [
        ("0", "0.910", "0.354", "+0.556"),
        ("1", "0.890", "–", "–"),
        ("mean", "0.910", "0.354", "+0.556"),
    ]


def test_missing_pieces_are_dashes(tmp_path: Path) -> None:
    write_json(tmp_path / "bigram.json", {"results": {"bpb": 2.345}})
    for table in demo_tables(load_demo(tmp_path)):
        for row in table.rows:
            assert len(row.cells) == len(table.columns)
            assert set(row.cells[table.text_columns :]) <= {"–", "2.345"}
    assert "2.345" in printed(tmp_path)


def test_a_speed_at_another_context_says_so(demo: Path) -> None:
    speed = {"context": 4096, "tokens_per_second": 70.0}
    write_evaluation(demo / "language" / "full", "decode-speed", speed)
    assert language_table(load_demo(demo)).rows[0].cells[-1] == "70.0 (at 4K)"


def test_training_that_differs_is_said(demo: Path) -> None:
    assert "All were trained on the same data" in language_table(load_demo(demo)).meaning[0]
    write_json(demo / "language" / "full" / "run.json", {"tokens": 1})
    assert "NOT all trained" in language_table(load_demo(demo)).meaning[0]


def test_not_a_number_is_shown(demo: Path) -> None:
    write_evaluation(demo / "language" / "full", "bpb", {"bpb": float("nan")})
    assert language_table(load_demo(demo)).rows[0].cells[2] == "nan"


def test_terminal_text_is_plain_and_narrow(demo: Path) -> None:
    text = printed(demo)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    lines = [line for line in text.splitlines() if line.strip().startswith("KVM, 4·sqrt(N) rows +")]
    assert lines and "16.5 MiB" in lines[0] and "65.5" in lines[0], "a row fits on one line"


def test_many_settings_go_below_one_another(demo: Path) -> None:
    grid = [{"length": 64 * k, "pairs": 4, "accuracy": k / 100} for k in range(1, 15)]
    write_evaluation(demo / "recall" / "full-seed0", "recall", {"grid": grid})
    text = printed(demo)
    assert "0.140" in text and text.count("Associative recall") == 2
    assert any("Full attention" in line and "0.010" in line for line in text.splitlines())


def test_names_are_not_markup(demo: Path) -> None:
    write_json(demo / "language" / "full" / "run.json", {"description": "Full [red]x[/red]"})
    assert "Full [red]x[/red]" in printed(demo)


def test_prints_to_standard_output(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(load_demo(demo))
    assert "4.00 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (binary_size(640), "640 B"),
        (binary_size(1024), "1.00 KiB"),
        (binary_size(1000 * 2**20), "0.98 GiB"),
        (binary_size(0), "0 B"),
        (length(32768), "32K"),
        (length(2**20), "1M"),
        (length(1500), "1,500"),
        (rate(1234.5), "1,234"),
        (short_count(999), "999"),
        (short_count(12_345), "12.3K"),
        (printable("a\x1b[0m\n\ud800"), "a\ufffd[0m\n\ufffd"),
    ],
)
def test_wording(said: str, expected: str) -> None:
    assert said == expected
