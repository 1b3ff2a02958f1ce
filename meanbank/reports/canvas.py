"""Figures to PNG files, the same bytes for the same numbers; and the tables beside them."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanbank.reports.files import csv_lines, write_whole
from meanbank.reports.palette import BELOW, FORM_COLORS, figure_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_COLORS = (64, 32, 16)
_SMALL_BYTES = 60_000


def png(size: tuple[float, float], draw: "Callable[[Canvas], None]") -> bytes:
    """The PNG file of a figure of so many inches, drawn by `draw` in our look."""
    with figure_style():
        canvas = _canvas(size)
        draw(canvas)
        return _content(canvas)


@contextmanager
def png_file(path: Path, size: tuple[float, float]) -> "Iterator[Canvas]":
    """A figure of so many inches in our look; at the end it is at `path`, whole."""
    with figure_style():
        canvas = _canvas(size)
        yield canvas
        write_whole(path, _content(canvas))


def _canvas(size: tuple[float, float]) -> "Canvas":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(canvas)
    return canvas


def _content(canvas: "Canvas") -> bytes:
    content = io.BytesIO()
    # Without a version in the file, the same results give the same bytes.
    canvas.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def in_few_colors(picture: bytes) -> bytes:
    """A PNG file as one of few colours, at most 60 KB where that can be."""
    from PIL import Image

    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    small = picture
    for colors in _COLORS:
        saved = io.BytesIO()
        whole.quantize(colors, dither=Image.Dither.NONE).save(saved, "png", optimize=True)
        small = saved.getvalue()
        if len(small) <= _SMALL_BYTES:
            break
    return small


def form_legend(canvas: "Canvas", names: Sequence[str], labels: Sequence[str]) -> None:
    """Squares in the colours of forms, below everything."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=FORM_COLORS[name], edgecolor="#999999", linewidth=0.5, label=label)
        for name, label in zip(names, labels, strict=True)
    ]
    columns = max(1, min(len(handles), int(canvas.get_figwidth() / 1.7)))
    canvas.legend(handles=handles, loc=BELOW, ncols=columns, handlelength=1.2)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Comma-separated values with a line of names."""
    write_whole(path, csv_lines(columns, rows).encode("utf-8"))
