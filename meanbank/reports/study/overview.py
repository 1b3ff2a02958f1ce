"""The overview over all published studies: what became of each claim of the two papers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from meanbank.reports.files import write_whole
from meanbank.reports.study.claims import NOT_TESTABLE, number_said, range_said, threshold_said
from meanbank.reports.study.document import Block, Caution, Prose, Section
from meanbank.reports.study.provenance import Facts
from meanbank.reports.study.published import Published, read_published
from meanbank.reports.study.results import Claim, NotTestable
from meanbank.reports.study.text import document_markdown
from meanbank.reports.tables import Row, Table
from meanbank.reports.wording import DASH, duration, grouped, listed

_MARK = "<!-- Written by `meanbank study report --page`; what is changed here is lost. -->\n"
_PAPERS = {  # title -> what its source says
    "Key-Value Means (arXiv 2605.09877)": "2605.09877",
    "Bank of Values (arXiv 2606.02780)": "2606.02780",
}
_OURS = "Claims of our own"
_FOLDER = "results"

_HOW_FAR = (
    "This reproduces mechanisms at CPU scale, with small models trained from scratch for minutes. "
    "It does not repeat the papers' large runs: “holds” is what these models show, and “not seen” "
    "or “reversed” contradicts no result of a large model."
)
_MEANING = (
    "Means and intervals are over the seeds of a study, whose page has each of them. What a source "
    "reports, or what was expected beforehand, is shown where something else was found."
)
_INTERVALS = (
    "An interval is that of the mean over seeds, or, of a claim about each seed, from the lowest "
    "seed to the highest. Unlike a study's verdict, it is not adjusted for the number of claims."
)


def write_overview(folder: Path) -> Path | None:
    """Write `README.md` of a folder with pages of studies, from their `claims.json`.

    Returns its path, or None where it was not written: there is a README that is none of ours, or
    the folder is none for results: it has another name than `results`, and a single page.
    """
    path, pages = folder / "README.md", list(read_published(folder))
    if path.exists():
        is_ours = path.read_bytes().startswith(_MARK.encode("utf-8"))
        if not is_ours:
            return None
    elif folder.name != _FOLDER and len(pages) < 2:
        return None
    text = _MARK + document_markdown("Results", list(overview(pages)))
    write_whole(path, text.encode("utf-8", "replace"))
    return path


def overview(pages: Sequence[Published]) -> Iterator[Section]:
    """What it tells, in reading order."""
    yield Section(title="", blocks=(Caution(text=_HOW_FAR), Prose(paragraphs=(_MEANING,))))
    for title in (*_PAPERS, _OURS):
        yield from _claims(title, pages)
    yield Section(title="What the verdicts mean", blocks=tuple(_words(pages)))
    yield Section(title="Studies", blocks=(_studies(pages),))


def _claims(title: str, pages: Sequence[Published]) -> Iterator[Section]:
    """One row a claim: those that were tested, then those that could not be."""
    tested = [(page, one) for page in pages for one in page.claims if _of(one) == title]
    others = [(page, one) for page in pages for one in page.not_testable if _of(one) == title]
    if not tested and not others:
        return
    counts = Counter(claim.outcome for _, claim in tested)
    said = [f"{outcome} ({count})" for outcome, count in counts.items()]
    said += [f"{NOT_TESTABLE} ({len(others)})"] if others else []
    table = Table(
        title=title,
        meaning=(f"{listed(said)}.",),
        columns=("Claim", "Verdict here", "Mean and interval", "Seeds", "Study"),
        rows=(
            *(_row(page, _tested(claim)) for page, claim in tested),
            *(_row(page, _untested(one)) for page, one in others),
        ),
        text_columns=2,
    )
    yield Section(title=title, blocks=(table,))


def _of(claim: Claim | NotTestable) -> str:
    """The title of the table that a claim belongs to."""
    return next((title for title, number in _PAPERS.items() if number in claim.source), _OURS)


def _row(page: Published, cells: tuple[str, ...]) -> Row:
    return Row(cells=(*cells, page.folder), link=f"{quote(page.folder)}/README.md#claims")


def _tested(claim: Claim) -> tuple[str, ...]:
    notes = [] if claim.outcome.endswith(claim.expected) else [f"expected: {claim.expected}"]
    return (
        f"{claim.says}\n{claim.name}" if claim.says else claim.name,
        "\n".join([claim.outcome, *notes, *claim.notes]),
        _measured(claim),
        grouped(len(claim.values)) if claim.values else DASH,
    )


def _measured(claim: Claim) -> str:
    claimed = f"claimed: {threshold_said(claim)}"
    if claim.each and claim.values:
        ends = min(claim.values.values()), max(claim.values.values())
        return f"{range_said(claim, ends)}\n{claimed} in each seed"
    if claim.mean is None:
        return f"{DASH}\n{claimed}"
    mean, interval = number_said(claim, claim.mean), range_said(claim, claim.interval)
    return f"{mean} ({interval})\n{claimed}"


def _untested(claim: NotTestable) -> tuple[str, ...]:
    return (claim.says, f"{NOT_TESTABLE}\n{claim.why}", DASH, DASH)


def _words(pages: Sequence[Published]) -> Iterator[Block]:
    """What each outcome means, as the studies have it."""
    meant = {outcome: text for page in pages for outcome, text in page.outcomes.items()}
    untestable = (NOT_TESTABLE, "published, but out of reach of small models on a CPU.")
    yield Prose(paragraphs=(_INTERVALS,))
    yield Facts(title="Outcomes", items=(*meant.items(), untestable))


def _studies(pages: Sequence[Published]) -> Table:
    rows = (
        Row(
            cells=(
                f"{page.title}\n{page.command}",
                ", ".join(f"{name} {value}" for name, value in page.machine.items()) or DASH,
                grouped(page.runs),
                duration(page.seconds),
                page.folder,
            ),
            link=f"{quote(page.folder)}/README.md",
        )
        for page in pages
    )
    return Table(
        title="Studies",
        meaning=("Computing time is that of all runs one after the other.",),
        columns=("Study", "Made with", "Runs", "Computing time", "Page"),
        rows=tuple(rows),
        text_columns=2,
    )
