"""A new figure, saved whole; what every picture in a file of its own begins with."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanbank.reports.files import write_whole
from meanbank.reports.palette import FORM_COLORS, figure_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_BELOW: Any = "outside lower center"  # Any: the types of matplotlib know only places inside


@contextmanager
def png_file(path: Path, size: tuple[float, float]) -> "Iterator[Canvas]":
    """A figure of so many inches in our look; at the end it is at `path`, whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with figure_style():
        canvas = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        yield canvas
        content = io.BytesIO()
        # Without a version in the file, the same results give the same bytes.
        canvas.savefig(content, format="png", metadata={"Software": None})
    write_whole(path, content.getvalue())


def form_legend(canvas: "Canvas", names: Sequence[str], labels: Sequence[str]) -> None:
    """Squares in the colours of forms, below everything."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=FORM_COLORS[name], edgecolor="#999999", linewidth=0.5, label=label)
        for name, label in zip(names, labels, strict=True)
    ]
    columns = max(1, min(len(handles), int(canvas.get_figwidth() / 1.7)))
    canvas.legend(handles=handles, loc=_BELOW, ncols=columns, handlelength=1.2)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Comma-separated values with a line of names."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(columns)
    out.writerows(rows)
    write_whole(path, text.getvalue().encode("utf-8"))
