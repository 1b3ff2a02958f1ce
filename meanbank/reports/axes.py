"""Axes of tokens and of bytes, and what is written beside lines."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from meanbank.reports.palette import GUIDE
from meanbank.reports.wording import binary_size, length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_LABEL_GAP = 0.05  # of an axis


def token_axis(axes: "Axes", *, powers_apart: int) -> None:
    """A logarithmic axis of tokens, with a label every so many powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2**powers_apart, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: length(round(tokens))))


def byte_axis(axes: "Axes") -> None:
    """A logarithmic axis of bytes, upright."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=16))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: _round_size(size)))


def log_axis(axes: "Axes") -> None:
    """A logarithmic axis of plain numbers, upright."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def mark_tokens(axes: "Axes", tokens: int, text: str) -> None:
    """A dotted upright line, named at its upper end."""
    axes.axvline(tokens, color=GUIDE, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axes.annotate(
        text,
        (tokens, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3, -1),
        textcoords="offset points",
        color=GUIDE,
        fontsize=8,
        horizontalalignment="right",
        verticalalignment="top",
    )


def mark_level(axes: "Axes", level: float, text: str) -> None:
    """A dashed level line, named at its right end."""
    axes.axhline(level, color=GUIDE, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        text,
        (1, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color=GUIDE,
        fontsize=8,
        horizontalalignment="right",
    )


def label_ends(axes: "Axes", ends: Iterable[tuple[float, str, str]], fontsize: float = 8.5) -> None:
    """Write each (value, text, color) beside a logarithmic axis, apart from one another."""
    low, high = axes.get_ylim()
    lowest = -1.0
    for value, text, color in sorted(ends):
        height = math.log(value / low) / math.log(high / low)
        lowest = max(height, lowest + _LEAST_LABEL_GAP)
        axes.annotate(
            text,
            (1.015, lowest),
            xycoords="axes fraction",
            color=color,
            fontsize=fontsize,
            verticalalignment="center",
        )


def _round_size(size: float) -> str:
    number, unit = binary_size(size).split(" ")
    return f"{float(number):g} {unit}"
