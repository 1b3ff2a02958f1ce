import math

import pytest

from meanbank.reports.markdown import fenced, markdown_table, markdown_text
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import (
    binary_size,
    duration,
    length,
    measured,
    operations,
    printable,
    probability,
    rate,
    short_count,
)


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
        (operations(1.234e13), "12.3 TFLOP"),
        (operations(12.0), "12 FLOP"),
        (duration(59.94), "59.9 s"),
        (duration(90), "1.5 min"),
        (duration(5400), "1.5 h"),
        (measured(1234.5), "1,234"),
        (measured(0.98765), "0.988"),
        (measured(-0.0061234), "-0.0061"),
        (measured(0.5, like=-0.0061), "0.5000"),
        (measured(0.0), "0.000"),
        (measured(math.nan), "nan"),
        (measured(1.0, like=math.nan), "1.000"),
        (probability(0.0004), "<\N{NO-BREAK SPACE}0.001"),
        (probability(0.25), "0.250"),
    ],
)
def test_wording(said: str, expected: str) -> None:
    assert said == expected


def test_markdown_of_a_table_escapes_all_but_its_own() -> None:
    cells = ("a|b *c* <i> `d`\nsee [x](y)", "1.5\n1, 2")
    table = Table(title="T", meaning=(), columns=("Arm\nname", "A|B"), rows=(Row(cells=cells),))
    assert markdown_table(table) == (
        "| Arm name | A\\|B |\n"
        "| --- | ---: |\n"
        "| a\\|b \\*c\\* \\<i\\> \\`d\\`<br><small>see \\[x\\](y)</small> "
        "| 1.5<br><small>1, 2</small> |\n"
    )


def test_a_fence_is_longer_than_any_in_the_text() -> None:
    assert fenced("a\n````\nb") == "`````text\na\n````\nb\n`````\n"
    assert markdown_text("two\nlines & more") == "two lines \\& more"
