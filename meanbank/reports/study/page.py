"""The report as one page that needs nothing beside it: no scripts, no fetches."""

import base64
from collections.abc import Mapping, Sequence
from functools import singledispatchmethod
from html import escape
from importlib.resources import files
from itertools import groupby

from meanbank.reports.study.document import Block, Caution, Code, Prose, Sample, Section
from meanbank.reports.study.figure import Figure
from meanbank.reports.study.provenance import Facts
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import printable

# Forbids all but what is in the page itself, whatever a model may have generated.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Page:
    """Sections as HTML; `pictures` are the PNG files of its figures by name."""

    def __init__(self, pictures: Mapping[str, bytes]) -> None:
        self.pictures = pictures

    def render(self, title: str, sections: Sequence[Section]) -> str:
        """The whole page."""
        style = files("meanbank.reports").joinpath("report.css").read_text(encoding="utf-8")
        parts = [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            f"<h1>{_text(title)}</h1>",
            *(self._section(section) for section in sections),
            "</body>",
            "</html>",
        ]
        return "\n".join(parts) + "\n"

    def _section(self, section: Section) -> str:
        parts = [f"<h2>{_text(section.title)}</h2>"] if section.title else []
        for pictures, blocks in groupby(section.blocks, lambda b: isinstance(b, Figure)):
            shown = [self._block(block, section) for block in blocks]
            parts += ['<div class="figures">', *shown, "</div>"] if pictures else shown
        return "\n".join(parts)

    @singledispatchmethod
    def _block(self, block: Block, section: Section) -> str:
        raise TypeError(block)

    @_block.register
    def _(self, block: Prose, section: Section) -> str:
        return "\n".join(f"<p>{_text(paragraph)}</p>" for paragraph in block.paragraphs)

    @_block.register
    def _(self, block: Caution, section: Section) -> str:
        return f'<p class="caution">{_text(block.text)}</p>'

    @_block.register
    def _(self, block: Table, section: Section) -> str:
        heading = "" if block.title == section.title else f"<h3>{_text(block.title)}</h3>\n"
        meaning = "".join(f"<p>{_text(paragraph)}</p>\n" for paragraph in block.meaning)
        return f"{heading}{meaning}{_table(block)}"

    @_block.register
    def _(self, block: Figure, section: Section) -> str:
        image = base64.b64encode(self.pictures[block.name]).decode("ascii")
        numbers = base64.b64encode(block.csv().encode("utf-8")).decode("ascii")
        name = _text(block.name)
        return f"""<figure>
<h3>{_text(block.title)}</h3>
<img alt="{_text(block.alternative)}" src="data:image/png;base64,{image}">
<figcaption>{_text(block.caption)}
<a download="{name}.csv" href="data:text/csv;base64,{numbers}">Numbers as CSV</a></figcaption>
</figure>"""

    @_block.register
    def _(self, block: Facts, section: Section) -> str:
        items = "\n".join(f"<dt>{_text(n)}</dt><dd>{_text(value)}</dd>" for n, value in block.items)
        return f"<h3>{_text(block.title)}</h3>\n<dl>\n{items}\n</dl>"

    @_block.register
    def _(self, block: Sample, section: Section) -> str:
        said = f"<b>{_text(block.prompt)}</b>{_text(block.text)}"
        return f"<h3>{_text(block.label)}</h3>\n<pre>{said}</pre>"

    @_block.register
    def _(self, block: Code, section: Section) -> str:
        return f"<pre>{_text(block.text)}</pre>"


def _text(text: str) -> str:
    return escape(printable(text))


def _table(table: Table) -> str:
    headings = []
    for index, column in enumerate(table.columns):
        words = ' class="words"' if index < table.text_columns else ""
        label = _text(column).replace("\n", "<br>")
        headings.append(f'<th scope="col"{words}>{label}</th>')
    body = "\n".join(_row(row, table.text_columns) for row in table.rows)
    return f"""<div class="scroll" tabindex="0">
<table>
<thead><tr>{"".join(headings)}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>"""


def _row(row: Row, text_columns: int) -> str:
    cells = []
    for index, cell in enumerate(row.cells):
        first, *details = (_text(line) for line in cell.split("\n"))
        said = first + "".join(f"<small>{line}</small>" for line in details)
        if index == 0:
            cells.append(f'<th scope="row" class="words">{said}</th>')
        elif index < text_columns:
            cells.append(f'<td class="words">{said}</td>')
        else:
            cells.append(f"<td>{said}</td>")
    look = f' class="{row.tone}"' if row.tone else ""
    return f"<tr{look}>{''.join(cells)}</tr>"
