"""Tables on a terminal; plain lines where there is none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import printable

_COLUMNS = 100
_GAP = 2  # between columns
_WORDS = 18  # letters of a column of words that numbers leave room for, where they can


def print_table(table: Table, console: Console | None = None, *, meaning: bool = False) -> None:
    """Print one table, by default to standard output, and below it what it means if wanted.

    Of a cell with details, its first line is shown.
    """
    console = console or _standard_output()
    for part in _parts(table, console.width):
        console.print(_rendered(part))
    if meaning:
        for line in table.meaning:
            console.print(Text(line, style="dim"))
        console.print()


def _standard_output() -> Console:
    console = Console()
    # A pipe or a file has no width of its own, and rich would take 80 columns for it.
    return console if console.is_terminal else Console(width=_COLUMNS)


def _parts(table: Table, width: int) -> Iterator[Table]:
    """The table, or several with the same first columns where the numbers need more width."""
    table = replace(table, rows=tuple(replace(row, cells=_first_lines(row)) for row in table.rows))
    words = range(table.text_columns)
    room = width - sum(min(_width(table, index), _WORDS) + _GAP for index in words)
    shown: list[int] = []
    taken = 0
    for index in range(table.text_columns, len(table.columns)):
        needed = _width(table, index) + _GAP
        if shown and taken + needed > room:
            yield _with_columns(table, [*words, *shown])
            shown, taken = [], 0
        shown.append(index)
        taken += needed
    yield _with_columns(table, [*words, *shown])


def _first_lines(row: Row) -> tuple[str, ...]:
    return tuple(cell.partition("\n")[0] for cell in row.cells)


def _width(table: Table, index: int) -> int:
    cells = [row.cells[index] for row in table.rows]
    return max(map(len, [*cells, *table.columns[index].splitlines()]))


def _with_columns(table: Table, chosen: Sequence[int]) -> Table:
    return replace(
        table,
        columns=tuple(table.columns[index] for index in chosen),
        rows=tuple(
            replace(row, cells=tuple(row.cells[index] for index in chosen)) for row in table.rows
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
        # Text, not str: names of models are not markup.
        rendered.add_column(
            Text(printable(column)),
            justify="left" if words else "right",
            overflow="fold",
            vertical="bottom",
            # Numbers never wrap; the names take what is left.
            width=None if words else _width(table, index),
        )
    for row in table.rows:
        rendered.add_row(*(Text(printable(cell)) for cell in row.cells))
    return rendered
