"""Wins, ties and losses between two arms, item by item."""

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.palette import BELOW
from meanbank.reports.study.figure import MOST_ARMS, Figure, Looks, file_name
from meanbank.reports.study.results import Comparison, Group
from meanbank.reports.wording import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_COLORS = {"wins": "#0072B2", "ties": "#d0d0d0", "losses": "#D55E00"}


def item_figures(group: Group, looks: Looks) -> Iterator[Figure]:
    """Bars of wins, ties and losses with the mean difference beside them, a panel an arm.

    They would be too many for a picture of more than a few arms.
    """
    found = list(group.comparisons)
    if not found or len(group.arms) > MOST_ARMS:
        return
    panels: dict[str, list[Comparison]] = {}
    for one in found:
        panels.setdefault(one.against, []).append(one)
    first = group.labels[found[0].arm]

    def draw(canvas: "Canvas") -> None:
        from matplotlib.patches import Patch

        counts = [len(shown) for shown in panels.values()]
        grid: Any = canvas.subplots(
            len(panels), 1, squeeze=False, sharex=True, height_ratios=[n + 1 for n in counts]
        )
        for axes, (against, shown) in zip(grid[:, 0], panels.items(), strict=True):
            _draw_bars(axes, shown)
            axes.set_title(fill(f"against {group.labels[against]}", 44), fontsize=9)
        grid[-1, 0].set_xlabel(f"items (%), from the view of {first}")
        handles = [Patch(color=color, label=name) for name, color in _COLORS.items()]
        canvas.legend(handles=handles, loc=BELOW, ncols=len(handles))

    yield Figure(
        name=file_name(group.name, "items"),
        title=f"Item by item: {first} against the others",
        caption=f"Of the items that both were asked, how many {first} does better (wins), equally "
        "well and worse, a mean over seeds each; on the right the mean difference with its 95 % "
        "interval over items.",
        alternative=_words(group, found, first),
        height=0.9 + sum(0.42 + 0.24 * len(shown) for shown in panels.values()),
        points=found,
        draw=draw,
    )


def _draw_bars(axes: "Axes", shown: list[Comparison]) -> None:
    places = range(len(shown))
    left = [0.0] * len(shown)
    for name, color in _COLORS.items():
        widths = [100 * getattr(one, name) / one.items for one in shown]
        axes.barh(places, widths, left=left, color=color, height=0.72, label=name)
        for place, (width, start) in enumerate(zip(widths, left, strict=True)):
            count = getattr(shown[place], name)
            if width >= 8:
                middle, dark = start + width / 2, name == "ties"
                ink = "#222222" if dark else "white"
                axes.text(middle, place, str(count), ha="center", va="center", color=ink, size=7.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, one in enumerate(shown):
        between = f"{signed(one.mean)} ({signed(one.low)} to {signed(one.high)})"
        axes.text(101.5, place, between, va="center", size=8)
    axes.set_yticks(places, [one.score for one in shown])
    axes.set_xlim(0, 100)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


def _words(group: Group, found: list[Comparison], first: str) -> str:
    said = (
        f"{group.labels[one.against]} on {one.score}: {one.wins} wins, {one.ties} ties, "
        f"{one.losses} losses, mean difference {signed(one.mean)}"
        for one in found
    )
    return f"Bars of items that {first} does better, equally well and worse. {'; '.join(said)}."
