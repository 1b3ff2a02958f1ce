"""The report as one page that needs nothing beside it: no scripts, no fetches."""

import base64
from html import escape
from importlib.resources import files
from pathlib import Path

from meanbank.reports.expectations import expectations_table
from meanbank.reports.figures import Figure, draw_figures
from meanbank.reports.files import write_whole
from meanbank.reports.loading import load_demo
from meanbank.reports.provenance import Facts, what_was_run
from meanbank.reports.results import DemoResults, Sample
from meanbank.reports.tables import Row, Table, contrast_table, language_table, recall_table
from meanbank.reports.wording import binary_size, listed, printable, rate

TITLE = "meanbank demo"
# Forbids all but what is in the page itself, whatever a model may have generated.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(folder: Path | str) -> Path:
    """Draw the figures of a demo into `folder/figures` and write `folder/report.html`.

    Raises ValueError for a folder without results.
    """
    folder = Path(folder)
    results = load_demo(folder)
    figures = draw_figures(results, folder / "figures")
    path = folder / "report.html"
    write_whole(path, report_page(results, figures).encode("utf-8"))
    return path


def report_page(results: DemoResults, figures: dict[str, Figure]) -> str:
    """The page as HTML; `figures` by name, those that could be drawn."""
    style = files("meanbank.reports").joinpath("report.css").read_text(encoding="utf-8")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{TITLE}</title>",
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        f"<h1>{TITLE}</h1>",
        "<p>Small models that differ in two choices: how attention remembers the past, and where "
        "its values come from.</p>",
        f'<p class="caution">{_text(_caution(results))}</p>',
        _figure(figures.get("overview")),
        _table(language_table(results)),
        _figure(figures.get("loss-by-position"), "single"),
        _figure(figures.get("memory"), "single"),
        _table(recall_table(results)),
        _figure(figures.get("recall-by-pairs"), "single"),
        _table(contrast_table(results)),
        _table(expectations_table(results)),
        _training(figures.get("training")),
        _samples(results),
        _what_was_run(what_was_run(results)),
        "</body>",
        "</html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _caution(results: DemoResults) -> str:
    seeds = results.recall_seeds
    recall = ""
    if seeds:
        count = "a single seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
        recall = f" The recall models have {count} ({listed([str(seed) for seed in seeds])})."
    return (
        "How far this goes: it shows mechanisms at CPU scale, with small models and few seeds. "
        "It does not repeat the papers' large runs, and small differences mean little. Each "
        "language model is a single seed, so its numbers have no error bar over seeds; the "
        f"standard errors shown are over documents only.{recall}"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _table(table: Table) -> str:
    headings = []
    for index, column in enumerate(table.columns):
        words = ' class="words"' if index < table.text_columns else ""
        label = _text(column).replace("\n", "<br>")
        headings.append(f'<th scope="col"{words}>{label}</th>')
    meaning = "\n".join(f"<p>{_text(paragraph)}</p>" for paragraph in table.meaning)
    body = "\n".join(_row(row, table.text_columns) for row in table.rows)
    return f"""<h2>{_text(table.title)}</h2>
{meaning}
<div class="scroll">
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
        if index == 0:
            cells.append(f'<th scope="row" class="words">{_text(cell)}</th>')
        elif index < text_columns:
            cells.append(f'<td class="words">{_text(cell)}</td>')
        else:
            cells.append(f"<td>{_text(cell)}</td>")
    emphasis = ' class="mean"' if row.emphasis else ""
    return f"<tr{emphasis}>{''.join(cells)}</tr>"


def _figure(figure: Figure | None, kind: str = "wide") -> str:
    if figure is None:
        return ""
    image = base64.b64encode(figure.path.read_bytes()).decode("ascii")
    return f"""<figure class="{kind}">
<img alt="{_text(figure.alternative)}" src="data:image/png;base64,{image}">
<figcaption>{_text(figure.caption)}</figcaption>
</figure>"""


def _training(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"<h2>Training</h2>\n{_figure(figure)}"


def _samples(results: DemoResults) -> str:
    if not results.samples:
        return ""
    labels = {arm.name: arm.label for arm in results.language}
    shown = "\n".join(_sample(sample, labels) for sample in results.samples)
    return f"""<h2>Generated text</h2>
<p>The prompt is set apart in bold; what follows it is the model's. Models of this size know the
look of a text, not its sense.</p>
{shown}"""


def _sample(sample: Sample, labels: dict[str, str]) -> str:
    facts = []
    if sample.tokens_per_second is not None:
        facts.append(f"{rate(sample.tokens_per_second)} tokens/s")
    if sample.memory_bytes is not None:
        facts.append(f"{binary_size(sample.memory_bytes)} of memory at the end")
    said = f"<p>{_text(', '.join(facts))}</p>\n" if facts else ""
    return f"""<h3>{_text(labels.get(sample.arm, sample.arm))}</h3>
{said}<pre><b>{_text(sample.prompt)}</b>{_text(sample.text)}</pre>"""


def _what_was_run(groups: list[Facts]) -> str:
    parts = ["<h2>What was run</h2>"]
    if not groups:
        parts.append("<p>The results do not say.</p>")
    for group in groups:
        items = "\n".join(
            f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in group.items
        )
        parts.append(f"<h3>{_text(group.title)}</h3>\n<dl>\n{items}\n</dl>")
    return "\n".join(parts)
