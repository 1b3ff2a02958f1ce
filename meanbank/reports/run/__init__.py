"""The report of one run, from the files in its folder."""

from collections.abc import Iterator
from pathlib import Path

from meanbank.reports.canvas import png
from meanbank.reports.files import as_count, write_whole
from meanbank.reports.run.curves import curve_figures
from meanbank.reports.run.layers import layer_figures
from meanbank.reports.run.loading import Run, load_run
from meanbank.reports.run.positions import loss_by_position
from meanbank.reports.study.document import Prose, Section, figures_of
from meanbank.reports.study.page import Page
from meanbank.reports.study.provenance import Facts, data_items, software_items
from meanbank.reports.wording import DASH, decimal, duration, grouped, rate

__all__ = ["load_run", "run_document", "write_run_report"]


def write_run_report(
    run: Path | str, path: Path, *, state: str = "", reason: str | None = None
) -> None:
    """Write the report of a run as one page that needs nothing beside it.

    state, reason: what became of the run, which its lock tells. Raises ValueError where it has no
    metrics yet.
    """
    found = load_run(Path(run), state=state, reason=reason)
    sections = run_document(found)
    pictures = {figure.name: png(figure.size, figure.draw) for figure in figures_of(sections)}
    write_whole(path, Page(pictures).render(_title(found), sections).encode("utf-8"))


def run_document(run: Run) -> list[Section]:
    """All of the report, in reading order."""
    return [
        Section(title="", blocks=(Facts(title="Run", items=tuple(_facts(run))),)),
        Section(title="Training", blocks=tuple(curve_figures(run))),
        Section(title="Use of context", blocks=tuple(loss_by_position(run)) or _POSITIONS),
        Section(title="Memories and values", blocks=tuple(layer_figures(run)) or _STATISTICS),
        Section(title="What was run", blocks=tuple(_provenance(run))),
    ]


_POSITIONS = (
    Prose(paragraphs=("Not measured; training.position_loss_every=100 logs it as training goes.",)),
)
_STATISTICS = (
    Prose(
        paragraphs=(
            "Not measured; training.memory_statistics_every=100 logs it as training goes, for "
            "models with compressed memories, banks or mixtures.",
        )
    ),
)


def _title(run: Run) -> str:
    description = str(run.info.get("description") or "")
    return f"{run.name}: {description}" if description else run.name


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    losses, steps = run.series("loss"), as_count(run.info.get("steps"))
    said = run.state or DASH
    yield "State", f"{said}: {run.reason}" if run.reason else said
    yield "Steps", f"{grouped(losses[-1][0])} of {grouped(steps)}"
    yield "Tokens read", grouped(_last(run, "tokens"))
    yield "Parameters", grouped(as_count(run.info.get("parameters")))
    yield "Longest sequence", f"{grouped(as_count(run.info.get('sequence_length')))} tokens"
    yield "Training loss, last step", f"{decimal(losses[-1][1])} nats a token"
    for step, value in run.series("held_out_bpb")[-1:]:
        yield "Held-out text, last measured", f"{decimal(value)} bits a byte after step {step:,}"
    speeds = sorted(value for _, value in run.series("tokens_per_second"))
    if speeds:
        yield "Tokens a second, median step", rate(speeds[len(speeds) // 2])
        yield "Time in training steps", duration(_seconds(run))


def _last(run: Run, name: str) -> int | None:
    points = run.series(name)
    return round(points[-1][1]) if points else None


def _seconds(run: Run) -> float:
    """Of all steps, whatever number of tries they took."""
    tokens, speeds = dict(run.series("tokens")), dict(run.series("tokens_per_second"))
    before, total = 0.0, 0.0
    for step, count in tokens.items():
        total += (count - before) / speeds[step] if speeds.get(step) else 0.0
        before = count
    return total


def _provenance(run: Run) -> Iterator[Facts]:
    seed = run.info.get("seed")
    seeds = () if seed is None else (("Seed", str(seed)),)
    yield Facts(title="Software and machine", items=(*software_items([run.info]), *seeds))
    items = data_items([run.info])
    if items:
        yield Facts(title="Data", items=items)
