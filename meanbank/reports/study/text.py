"""The report as Markdown, with pictures and numbers in files beside it."""

from collections.abc import Sequence
from functools import singledispatch

from meanbank.reports.markdown import fenced, markdown_table, markdown_text
from meanbank.reports.study.document import Block, Caution, Code, Prose, Sample, Section
from meanbank.reports.study.figure import Figure
from meanbank.reports.study.provenance import Facts
from meanbank.reports.tables import Table


def document_markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole text; figures are looked for in `figures/`."""
    parts = [f"# {markdown_text(title)}\n"]
    for section in sections:
        if section.title:
            parts.append(f"## {markdown_text(section.title)}\n")
        parts += [_block(block, section) for block in section.blocks]
    return "\n".join(parts)


@singledispatch
def _block(block: Block, section: Section) -> str:
    raise TypeError(block)


@_block.register
def _(block: Prose, section: Section) -> str:
    return "\n".join(f"{markdown_text(paragraph)}\n" for paragraph in block.paragraphs)


@_block.register
def _(block: Caution, section: Section) -> str:
    return f"> {markdown_text(block.text)}\n"


@_block.register
def _(block: Table, section: Section) -> str:
    parts = [] if block.title == section.title else [f"### {markdown_text(block.title)}\n"]
    parts += [f"{markdown_text(paragraph)}\n" for paragraph in block.meaning]
    return "\n".join([*parts, markdown_table(block)])


@_block.register
def _(block: Figure, section: Section) -> str:
    file = f"figures/{block.name}"
    picture = f"![{markdown_text(block.alternative)}]({file}.png)"
    caption = f"{markdown_text(block.caption)} [Numbers as CSV]({file}.csv)"
    return f"### {markdown_text(block.title)}\n\n{picture}\n\n{caption}\n"


@_block.register
def _(block: Facts, section: Section) -> str:
    items = (f"- {markdown_text(name)}: {markdown_text(value)}" for name, value in block.items)
    return "\n".join([f"### {markdown_text(block.title)}\n", *items, ""])


@_block.register
def _(block: Sample, section: Section) -> str:
    prompt = f"Prompt: {markdown_text(block.prompt)}\n"
    return f"### {markdown_text(block.label)}\n\n{prompt}\n{fenced(block.prompt + block.text)}"


@_block.register
def _(block: Code, section: Section) -> str:
    return fenced(block.text)
