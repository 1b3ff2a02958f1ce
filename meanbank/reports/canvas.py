"""Figures to PNG files, the same bytes for the same numbers."""

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

from meanbank.reports.palette import figure_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_COLORS = (64, 32, 16)
_SMALL_BYTES = 60_000


def png(size: tuple[float, float], draw: "Callable[[Canvas], None]") -> bytes:
    """The PNG file of a figure of so many inches, drawn by `draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with figure_style():
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas)
        content = BytesIO()
        # Without a version in the file, the same results give the same bytes.
        canvas.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def in_few_colors(picture: bytes) -> bytes:
    """A PNG file as one of few colours, at most 60 KB where that can be."""
    from PIL import Image

    whole = Image.open(BytesIO(picture)).convert("RGB")
    small = picture
    for colors in _COLORS:
        saved = BytesIO()
        whole.quantize(colors, dither=Image.Dither.NONE).save(saved, "png", optimize=True)
        small = saved.getvalue()
        if len(small) <= _SMALL_BYTES:
            break
    return small
