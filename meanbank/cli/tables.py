"""Tables of figures on the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def table(title: str, columns: list[str], rows: list[tuple]) -> Table:
    """A table whose first column is text and whose others are numbers; no text is markup."""
    from rich.table import Table

    table = Table(title=plain(title), title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(plain(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(plain(_cell(value)) for value in row))
    return table


def console() -> Console:
    """Standard output; what is no terminal has 100 columns."""
    from rich.console import Console

    found = Console()
    # a pipe has no width of its own, and rich would take 80 columns
    return found if found.is_terminal else Console(width=100)


def plain(text: str) -> Text:
    """A text of a user or a model for rich: brackets stay, what moves the cursor does not."""
    from rich.text import Text

    from meanbank.reports.wording import printable

    return Text(printable(text))


def _cell(value: object) -> str:
    if isinstance(value, float) and value >= 1e15:
        return f"{value:.4e}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
