"""The report of a study, from the files in its folder."""

from pathlib import Path

from meanbank.reports.canvas import in_few_colors, png
from meanbank.reports.files import write_whole
from meanbank.reports.study.document import (
    figures_of,
    short_document,
    study_document,
    study_tables_of,
)
from meanbank.reports.study.loading import load_study
from meanbank.reports.study.overview import write_overview
from meanbank.reports.study.page import Page
from meanbank.reports.study.published import write_published
from meanbank.reports.study.text import document_markdown
from meanbank.reports.tables import Table

__all__ = ["load_study", "study_tables", "write_results_page", "write_study_report"]


def write_study_report(folder: Path | str) -> Path:
    """Write `report.html`, `report.md` and `figures/*.png, *.csv` into the folder of a study.

    Returns the path of the page. Raises ValueError for a folder without a study.
    """
    folder = Path(folder)
    study = load_study(folder)
    sections = study_document(study)
    pictures = {}
    for figure in figures_of(sections):
        pictures[figure.name] = png(figure.size, figure.draw)
        write_whole(folder / "figures" / f"{figure.name}.png", pictures[figure.name])
        write_whole(folder / "figures" / f"{figure.name}.csv", figure.csv().encode("utf-8"))
    text = document_markdown(study.title, sections)
    write_whole(folder / "report.md", text.encode("utf-8"))
    path = folder / "report.html"
    write_whole(path, Page(pictures).render(study.title, sections).encode("utf-8"))
    return path


def write_results_page(folder: Path | str, destination: Path | str) -> list[Path]:
    """Write a short page of a study's results, and anew the overview over all pages beside it.

    The page is `README.md`, `figures/*.png, *.csv`, small, and `claims.json`, which the overview is
    made from: see `meanbank.reports.study.overview`. Returns the paths of the page and, where it
    was written, of the overview. Raises ValueError for a folder without a study.
    """
    destination = Path(destination)
    study = load_study(folder)
    sections = short_document(study)
    for figure in figures_of(sections):
        picture = in_few_colors(png(figure.size, figure.draw))
        write_whole(destination / "figures" / f"{figure.name}.png", picture)
        write_whole(destination / "figures" / f"{figure.name}.csv", figure.csv().encode("utf-8"))
    path = destination / "README.md"
    write_whole(path, document_markdown(study.title, sections).encode("utf-8"))
    write_published(destination, study)
    overview = write_overview(destination.resolve().parent)
    return [path] if overview is None else [path, overview]


def study_tables(folder: Path | str) -> list[Table]:
    """The tables of a study for a terminal: claims, arms, scores, runs that are not there."""
    return study_tables_of(load_study(folder))
