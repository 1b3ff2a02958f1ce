"""Tables and text as Markdown that GitHub shows as it is meant, whatever stands in the text."""

import re

from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import printable

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#&~$])")


def markdown_text(text: str) -> str:
    """Text with nothing in it that Markdown or HTML would take for its own, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))


def markdown_table(table: Table) -> str:
    """The rows of a table; further lines of a cell stand below its first one."""
    head = [markdown_text(column) for column in table.columns]
    rule = ["---" if index < table.text_columns else "---:" for index in range(len(head))]
    rows = [_cells(row) for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)) + "\n"


def markdown(table: Table) -> str:
    """The table with its title and meaning above it."""
    return f"**{table.title}.** {' '.join(table.meaning)}\n\n{markdown_table(table)}"


def fenced(text: str) -> str:
    """Text as it is, in a block of code that nothing in it can end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text)}\n{fence}\n"


def _cells(row: Row) -> list[str]:
    *cells, last = map(_cell, row.cells)
    return [*cells, f"[{last}]({row.link})" if row.link else last]


def _cell(cell: str) -> str:
    first, *others = (markdown_text(line) for line in cell.split("\n"))
    return "<br>".join([first, *(f"<small>{line}</small>" for line in others)])
