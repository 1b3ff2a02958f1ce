"""One look for every figure: an arm keeps its colour, marker and dashes through all of them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Style:
    """How an arm is drawn; dashes and markers tell lines apart that lie on each other."""

    color: str
    marker: str
    dashes: tuple[float, ...] = ()

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of `Axes.plot`."""
        return {"color": self.color, "dashes": self.dashes or (None, None)}


# Okabe and Ito's colours, which readers with any colour vision tell apart.
STYLES = {
    "full": Style(color="#222222", marker="o"),
    "block_window": Style(color="#009E73", marker="s", dashes=(2, 1.5)),
    "kvm_fixed": Style(color="#56B4E9", marker="^"),
    "kvm_sqrt": Style(color="#0072B2", marker="D"),
    "kvm_sqrt_bank": Style(color="#D55E00", marker="v", dashes=(5, 2)),
}
GUIDE = "#767676"
BELOW: Any = "outside lower center"  # Any: the types of matplotlib know only places inside
# How a token is held or seen; the same in every picture.
FORM_COLORS = {
    "exact": "#0072B2",
    "window": "#0072B2",
    "sink": "#D55E00",
    "own row": "#56B4E9",
    "shared row": "#E69F00",
    "merged": "#E69F00",
    "matrix": "#CC79A7",
    "not seen": "#E4E4E4",
    "later": "#FFFFFF",
}

COLORS = ("#222222", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B8860B")
_RAMP = ("#F0A202", "#D1495B", "#7B2D8B", "#12355B")  # each darker than the one before
_MARKERS = ("o", "D", "v", "s", "P", "^", "X")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (2, 1.5), (6, 1.5, 1.5, 1.5))


def arm_styles(groups: Iterable[Sequence[str]]) -> dict[str, Style]:
    """A style for each name in groups of arms: those with a style of their own keep it.

    The others get one that no other arm has, in order, where possible of a colour that is new to
    the group. With more than 196 arms, looks repeat.
    """
    groups = [list(group) for group in groups]
    styles = {name: STYLES[name] for group in groups for name in group if name in STYLES}
    for group in groups:
        for name in group:
            if name in styles:
                continue
            colors = {styles[other].color for other in group if other in styles}
            free = [style for style in _looks() if style not in styles.values()]
            fresh = [style for style in free if style.color not in colors]
            styles[name] = next(iter(fresh or free), STYLES["full"])
    return styles


def variant(color: str, number: int) -> Style:
    """A look of that colour; markers and dashes go by the number."""
    dashes = _DASHES[number % len(_DASHES)]
    return Style(color=color, marker=_MARKERS[number % len(_MARKERS)], dashes=dashes)


def ramp(count: int) -> list[str]:
    """So many colours from light to dark, for what has an order: times, or layers."""
    last = len(_RAMP) - 1
    return [_between(last * number / (count - 1) if count > 1 else last) for number in range(count)]


def _between(place: float) -> str:
    """The colour at a place of the ramp, counted in its colours."""
    first = min(int(place), len(_RAMP) - 2)
    ends = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in _RAMP[first : first + 2]]
    mixed = [low + (high - low) * (place - first) for low, high in zip(*ends, strict=True)]
    return "#" + "".join(f"{round(part):02X}" for part in mixed)


def _looks() -> Iterator[Style]:
    """Each colour once with a marker of its own, then with the next marker and dashes."""
    count = len(COLORS)
    for turn in range(count * len(_DASHES)):
        for index, color in enumerate(COLORS):
            dashes = _DASHES[(turn + index) % len(_DASHES)]
            yield Style(color=color, marker=_MARKERS[(turn + index) % count], dashes=dashes)


# Any: matplotlib has a type for the names of settings in some versions only.
_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": "#333333",
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    "text.parse_math": False,  # a dollar sign in the name of a model is a dollar sign
    "xtick.color": "#333333",
    "xtick.labelsize": 8.5,
    "ytick.color": "#333333",
    "ytick.labelsize": 8.5,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Matplotlib with our settings over its defaults, whatever the user's own say."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield
