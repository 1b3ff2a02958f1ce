"""Tables on a terminal; plain lines where there is none."""

from collections.abc import Iterator
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from meanbank.reports.expectations import demo_tables
from meanbank.reports.results import DemoResults
from meanbank.reports.tables import Table
from meanbank.reports.wording import printable

_COLUMNS = 100
_NUMBERS_A_ROW = 9


def print_tables(results: DemoResults, console: Console | None = None) -> None:
    """Print every table of the demo, by default to standard output."""
    console = console or _standard_output()
    for table in demo_tables(results):
        print_table(table, console)


def print_table(table: Table, console: Console | None = None, *, meaning: bool = False) -> None:
    """Print one table, by default to standard output, and below it what it means if wanted."""
    console = console or _standard_output()
    for part in _parts(table):
        console.print(_rendered(part))
    if meaning:
        for line in table.meaning:
            console.print(Text(line, style="dim"))
        console.print()


def _standard_output() -> Console:
    console = Console()
    # A pipe or a file has no width of its own, and rich would take 80 columns for it.
    return console if console.is_terminal else Console(width=_COLUMNS)


def _parts(table: Table) -> Iterator[Table]:
    """The table, or several with the same first columns where it has too many numbers a row."""
    words = table.text_columns
    for first in range(words, len(table.columns), _NUMBERS_A_ROW):
        chosen = [*range(words), *range(first, min(first + _NUMBERS_A_ROW, len(table.columns)))]
        yield replace(
            table,
            columns=tuple(table.columns[index] for index in chosen),
            rows=tuple(
                replace(row, cells=tuple(row.cells[index] for index in chosen))
                for row in table.rows
            ),
        )


def _rendered(table: Table) -> RichTable:
    rendered = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for index, column in enumerate(table.columns):
        words = index < table.text_columns
        cells = [row.cells[index] for row in table.rows]
        # Text, not str: names of models are not markup.
        rendered.add_column(
            Text(printable(column)),
            justify="left" if words else "right",
            overflow="fold",
            vertical="bottom",
            # Numbers never wrap; the names take what is left.
            width=None
            if words
            else max(len(line) for text in (*cells, column) for line in text.splitlines()),
        )
    for row in table.rows:
        style = "bold" if row.emphasis else ""
        rendered.add_row(*(Text(printable(cell), style=style) for cell in row.cells))
    return rendered
