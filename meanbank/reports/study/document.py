"""The report as data, in reading order, whatever it is shown as."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meanbank.reports.files import as_objects
from meanbank.reports.palette import arm_styles
from meanbank.reports.study.accuracies import accuracy_by_length_and_pairs, changes
from meanbank.reports.study.against import bits_per_byte
from meanbank.reports.study.claims import claims_figure, claims_table, not_testable_table
from meanbank.reports.study.curves import training
from meanbank.reports.study.figure import Figure, Looks
from meanbank.reports.study.grids import depth_by_length, distance_by_length
from meanbank.reports.study.items import item_figures
from meanbank.reports.study.lines import (
    loss_by_position,
    memory_by_context,
    score_by_length,
)
from meanbank.reports.study.parts import mixtures
from meanbank.reports.study.provenance import Facts, how_it_was_made, what_was_run
from meanbank.reports.study.results import Group, Study
from meanbank.reports.study.saved import memory_saved
from meanbank.reports.study.tables import (
    absent_table,
    arms_table,
    memory_statistics,
    score_tables,
)
from meanbank.reports.tables import Table
from meanbank.reports.wording import listed

_GROUP_FIGURES: tuple[Callable[[Group, Looks], Iterator[Figure]], ...] = (
    accuracy_by_length_and_pairs,
    changes,
    distance_by_length,
    bits_per_byte,
    loss_by_position,
    score_by_length,
    depth_by_length,
    training,
    mixtures,
    item_figures,
    memory_by_context,
    memory_saved,
)


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Paragraphs."""

    paragraphs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Caution:
    """What a reader has to know before the numbers."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that a model generated after a prompt."""

    label: str
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Code:
    """A command."""

    text: str


Block = Prose | Caution | Table | Figure | Facts | Sample | Code


@dataclass(frozen=True, kw_only=True)
class Section:
    """Blocks under a title; the first section of a document has none."""

    title: str
    blocks: tuple[Block, ...]


def study_document(study: Study) -> list[Section]:
    """All of the report; sections without anything are left out."""
    looks = _looks(study)
    return _filled(
        _opening(study),
        _claims(study),
        _arms(study),
        *(_section(group.label, _group_blocks(group, looks)) for group in study.groups),
        _section("Generated text", _samples(study)),
        _section("What was run", what_was_run(study)),
        _again(study),
    )


def short_document(study: Study) -> list[Section]:
    """What a page of results needs: claims, arms, the scores and figures of each group."""
    looks = _looks(study)
    return _filled(
        _opening(study),
        _claims(study),
        _arms(study),
        *(
            _section(group.label, (*score_tables(group), *_figures(group, looks)))
            for group in study.groups
        ),
        _section("How it was made", how_it_was_made(study)),
        _again(study),
    )


def study_tables_of(study: Study) -> list[Table]:
    """Tables for a terminal: claims, arms, scores, and runs that are not there."""
    tables = [claims_table(study)]
    for group in study.groups:
        tables += [arms_table(group), *score_tables(group)]
    tables.append(absent_table(study))
    return [table for table in tables if table is not None]


def figures_of(sections: Iterable[Section]) -> list[Figure]:
    """Every figure, in reading order."""
    return [b for section in sections for b in section.blocks if isinstance(b, Figure)]


def _filled(*sections: Section) -> list[Section]:
    return [section for section in sections if section.blocks]


def _section(title: str, blocks: Iterable[Block]) -> Section:
    return Section(title=title, blocks=tuple(blocks))


def _looks(study: Study) -> Looks:
    return arm_styles([arm.name for arm in group.with_reference] for group in study.groups)


def _opening(study: Study) -> Section:
    paragraphs = tuple(part.strip() for part in study.description.split("\n\n") if part.strip())
    prose, absent = Prose(paragraphs=paragraphs) if paragraphs else None, absent_table(study)
    blocks = prose, Caution(text=_caution(study)), absent
    return _section("", [block for block in blocks if block is not None])


def _caution(study: Study) -> str:
    count = {0: "no seeds", 1: "a single seed"}.get(len(study.seeds), f"{len(study.seeds)} seeds")
    which = f" ({listed([str(seed) for seed in study.seeds])})" if study.seeds else ""
    trained = (
        "it shows mechanisms at CPU scale, with small models and "
        f"{count}{which} an arm. It does not repeat large runs, and small differences mean little."
    )
    existing = (
        "models that existed before are measured as they are, on some samples of each task; other "
        "samples would give other numbers, and there are no seeds to tell by how much."
    )
    text = (
        f"How far this goes: {trained if study.has_seeds else existing} "
        "A verdict judges one claim by a rule and a threshold that were set beforehand: "
        "“holds” is what these models show, not a proof for others, and “undecided” is a result."
    )
    failed = sum(job.reason is not None for job in study.absent)
    missing = len(study.absent) - failed
    said = [
        f"{failed} failed" if failed else "",
        f"{missing} {'was' if missing == 1 else 'were'} not run" if missing else "",
    ]
    if study.absent:
        runs = len(study.absent) + len(study.jobs)
        text += (
            f" Of {runs} runs, {listed([part for part in said if part])}; they are listed below."
        )
    return text


def _claims(study: Study) -> Section:
    found = claims_table(study), not_testable_table(study.not_testable), claims_figure(study)
    return _section("Claims", [block for block in found if block is not None])


def _arms(study: Study) -> Section:
    return _section("Arms", (arms_table(group) for group in study.groups if group.arms))


def _figures(group: Group, looks: Looks) -> Iterator[Figure]:
    for figures in _GROUP_FIGURES:
        yield from figures(group, looks)


def _group_blocks(group: Group, looks: Looks) -> Iterator[Block]:
    yield from score_tables(group)
    yield from _figures(group, looks)
    yield from memory_statistics(group)


def _samples(study: Study) -> Sequence[Block]:
    samples = [
        Sample(label=arm.label, prompt=str(one.get("prompt", "")), text=str(one["text"]))
        for group in study.groups
        for title in group.titles("samples")
        for arm in group.arms
        for _, evaluation in arm.evaluations(title)[:1]
        for one in as_objects(evaluation.results.get("samples"))
        if "text" in one
    ]
    if not samples:
        return ()
    said = "Of the first seed of each arm."
    if study.has_seeds:
        said += " Models of this size know the look of a text, not its sense."
    return (Prose(paragraphs=(said,)), *samples)


def _again(study: Study) -> Section:
    said = (
        "The file study.yaml beside this report says everything that was run. A finished run is "
        "not done again in the same folder."
    )
    return _section("How to run it again", [Prose(paragraphs=(said,)), Code(text=command(study))])


def command(study: Study) -> str:
    """What runs a study again."""
    return f"meanbank study run {study.name} --out FOLDER"
