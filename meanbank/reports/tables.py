"""A table as text cells, the same for the terminal, for a page and for Markdown."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """Cells of one line; lines of a cell after its first one are details.

    tone: "good", "bad", "open" or "" for the colour of a verdict in the second cell, whose words
    say it too. link: what the last cell leads to, in Markdown.
    """

    cells: tuple[str, ...]
    tone: str = ""
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with what it means in plain words; the first `text_columns` hold words.

    Headings may be broken at their line breaks.
    """

    title: str
    meaning: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    text_columns: int = 1
