"""Numbers as a reader wants them, with a dash for what is missing."""

import math
from unicodedata import category

DASH = "–"

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def decimal(value: float | None, places: int = 3) -> str:
    """`1.2346` -> `1.235`."""
    return DASH if value is None else f"{value:.{places}f}"


def percent(value: float | None, places: int = 0) -> str:
    """`0.123` -> `12 %`."""
    return DASH if value is None else f"{100 * value:.{places}f} %"


def two_digits(share: float) -> str:
    """A share for narrow places: `0.934` -> `.93`, `0.998` -> `1.0`."""
    return f"{share:.2f}".removeprefix("0") if share < 0.995 else f"{share:.1f}"


def signed(value: float | None, places: int = 3) -> str:
    """A difference, always with its sign."""
    return DASH if value is None else f"{value:+.{places}f}"


def grouped(value: int | None) -> str:
    """`1234567` -> `1,234,567`."""
    return DASH if value is None else f"{value:,}"


def short_count(value: int | None) -> str:
    """`1234567` -> `1.23M`, for numbers of parameters and tokens."""
    if value is None:
        return DASH
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)}{unit}"
    return str(value)


def length(tokens: int) -> str:
    """`32768` -> `32K`, `1048576` -> `1M`; lengths that are not round stay as they are."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def binary_size(size: float | None) -> str:
    """`1610612736` -> `1.50 GiB`."""
    if size is None:
        return DASH
    power = 0
    while size >= 1000 and power < len(_BINARY_UNITS) - 1:
        size /= 1024
        power += 1
    return f"{_three_digits(size) if power else round(size)} {_BINARY_UNITS[power]}"


def rate(value: float | None) -> str:
    """Tokens a second: `1,234` or `12.3`."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def operations(value: float | None) -> str:
    """FLOPs: `1.23e15` -> `1.23 PFLOP`."""
    if value is None:
        return DASH
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}FLOP"
    return f"{value:.0f} FLOP"


def duration(seconds: float | None) -> str:
    """`90` -> `1.5 min`."""
    if seconds is None:
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def measured(value: float | None, like: float | None = None) -> str:
    """A score of unknown size with the digits that it needs, or that `like` needs.

    `1234.5` -> `1,234`, `0.98765` -> `0.988`, `0.0061234` -> `0.0061`.
    """
    if value is None:
        return DASH
    if not math.isfinite(value):
        return str(value)
    size = abs(value if like is None else like)
    if not math.isfinite(size) or size == 0 or 0.01 <= size < 100:
        places = 3
    elif size >= 100:
        places = 0 if size >= 1000 else 1
    else:
        places = min(8, 1 - math.floor(math.log10(size)))
    return f"{value:,.{places}f}"


def probability(value: float | None) -> str:
    """`0.00004` -> `< 0.001`."""
    if value is None:
        return DASH
    return f"{value:.3f}" if value >= 0.001 else "<\N{NO-BREAK SPACE}0.001"


def listed(items: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(part for part in (", ".join(items[:-1]), *items[-1:]) if part)


def printable(text: str) -> str:
    """Text without control characters and lone surrogates, which models do generate."""
    shown = (
        "\N{REPLACEMENT CHARACTER}" if category(c).startswith("C") and c not in "\n\t" else c
        for c in text
    )
    return "".join(shown)


def _three_digits(value: float) -> str:
    places = max(0, 2 - int(math.log10(value))) if value >= 1 else 2
    return f"{value:.{places}f}"
