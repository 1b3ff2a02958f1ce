"""Figures as PNG files, each with its caption and its words for readers who do not see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from meanbank.reports.canvas import png_file
from meanbank.reports.palette import STYLES
from meanbank.reports.panels import (
    draw_held_out,
    draw_loss_by_position,
    draw_memory,
    draw_recall,
    draw_training_loss,
    shown_buckets,
)
from meanbank.reports.results import DemoResults, LanguageArm, RecallArm
from meanbank.reports.tables import MEMORY_CONTEXTS
from meanbank.reports.wording import binary_size, decimal, length

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.figure import FigureBase

_BELOW: Any = "outside lower center"  # Any: the types of matplotlib know only places inside
_WIDTH, _WIDE = 7.2, 9.0  # inches
_LONGEST_LINE = 26


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure on disk; `alternative` says in words what it shows."""

    name: str
    path: Path
    caption: str
    alternative: str


@dataclass(frozen=True, kw_only=True)
class _Plan:
    size: tuple[float, float]
    draw: "Callable[[Canvas, DemoResults], None]"
    drawable: Callable[[DemoResults], bool]
    caption: str
    alternative: Callable[[DemoResults], str]


def draw_figures(results: DemoResults, folder: Path | str) -> dict[str, Figure]:
    """Save what the results allow as PNG files in `folder`; by name, in reading order."""
    figures = {}
    for name, plan in _PLANS.items():
        if not plan.drawable(results):
            continue
        path = Path(folder) / f"{name}.png"
        with png_file(path, plan.size) as canvas:
            plan.draw(canvas, results)
        figures[name] = Figure(
            name=name,
            path=path,
            caption=plan.caption,
            alternative=plan.alternative(results),
        )
    return figures


def _by_position(results: DemoResults) -> list[LanguageArm]:
    found = [arm for arm in results.language if arm.position_loss]
    return [arm for arm in found if arm.position_loss and shown_buckets(arm.position_loss)]


def _with_memory(results: DemoResults) -> list[LanguageArm]:
    return [arm for arm in results.language if arm.memory and any(arm.memory.bytes_at.values())]


def _trained(results: DemoResults) -> list[LanguageArm]:
    found = [arm for arm in results.language if arm.run]
    return [arm for arm in found if arm.run and (arm.run.curve.losses or arm.run.curve.held_out)]


def _recalling(results: DemoResults) -> list[RecallArm]:
    return [arm for arm in results.recall if any(run.accuracy for run in arm.runs)]


def _legend(
    canvas: "FigureBase",
    arms: Sequence[LanguageArm | RecallArm],
    *,
    inches: float,
    lines: bool = True,
) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for arm in arms:
        style = STYLES[arm.name]
        look: dict[str, Any] = style.line if lines else {"color": style.color, "linestyle": "none"}
        label = fill(arm.label, _LONGEST_LINE)
        handles.append(Line2D([], [], marker=style.marker, label=label, **look))
    # The width of a letter in inches, and the line before the label.
    widest = max((min(len(arm.label), _LONGEST_LINE) for arm in arms), default=1) * 0.08 + 0.6
    columns = max(1, min(3, int(inches / widest)))
    canvas.legend(handles=handles, loc=_BELOW, ncols=columns)


def _draw_overview(canvas: "Canvas", results: DemoResults) -> None:
    halves: Any = canvas.subfigures(1, 2, width_ratios=(2, 1.12))
    left, right = halves
    by_position, with_memory = _by_position(results), _with_memory(results)
    loss, memory = left.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    draw_loss_by_position(loss, by_position)
    draw_memory(memory, with_memory, label_ends=False)
    recall = right.subplots()
    recalling = _recalling(results)
    if recalling:
        draw_recall(recall, recalling, results.recall_settings)
    for axes, drawn in ((loss, by_position), (memory, with_memory), (recall, recalling)):
        if not drawn:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
    shown = {arm.name for arm in (*by_position, *with_memory)}
    named = [arm for arm in results.language if arm.name in shown]
    _legend(left, named, inches=5.7)
    _legend(right, recalling, inches=3.2, lines=False)


def _draw_position(canvas: "Canvas", results: DemoResults) -> None:
    draw_loss_by_position(canvas.subplots(), _by_position(results))
    _legend(canvas, _by_position(results), inches=_WIDTH)


def _draw_recall(canvas: "Canvas", results: DemoResults) -> None:
    draw_recall(canvas.subplots(), _recalling(results), results.recall_settings)
    _legend(canvas, _recalling(results), inches=_WIDTH, lines=False)


def _draw_memory(canvas: "Canvas", results: DemoResults) -> None:
    draw_memory(canvas.subplots(), _with_memory(results))
    _legend(canvas, _with_memory(results), inches=_WIDTH)


def _draw_training(canvas: "Canvas", results: DemoResults) -> None:
    loss, held_out = canvas.subplots(1, 2)
    draw_training_loss(loss, _trained(results))
    draw_held_out(held_out, _trained(results), results.bigram)
    _legend(canvas, _trained(results), inches=_WIDE)


def _say_position(results: DemoResults) -> str:
    ends = []
    for arm in _by_position(results):
        buckets = shown_buckets(arm.position_loss) if arm.position_loss else []
        ends.append(
            f"{arm.label} from {decimal(buckets[0].loss, 2)} to {decimal(buckets[-1].loss, 2)}"
        )
    return f"Lines of loss against token position. First to last point: {'; '.join(ends)}."


def _say_recall(results: DemoResults) -> str:
    parts = []
    for arm in _recalling(results):
        means = (
            f"{decimal(arm.mean(setting), 2)} at {setting[0]}/{setting[1]}"
            for setting in results.recall_settings
        )
        parts.append(f"{arm.label}: {', '.join(means)}")
    return f"Recall accuracy by tokens/pairs, mean over seeds. {'; '.join(parts)}."


def _say_memory(results: DemoResults) -> str:
    parts = []
    for arm in _with_memory(results):
        sizes = arm.memory.bytes_at if arm.memory else {}
        said = [
            f"{binary_size(sizes[context])} at {length(context)} tokens"
            for context in MEMORY_CONTEXTS
            if context in sizes
        ]
        parts.append(f"{arm.label}: {', '.join(said)}")
    return f"Lines of memory against tokens read. {'; '.join(parts)}."


def _say_training(results: DemoResults) -> str:
    parts = []
    for arm in _trained(results):
        held_out = arm.run.curve.held_out if arm.run else ()
        if held_out:
            parts.append(f"{arm.label} {decimal(held_out[-1][1])}")
    last = f" Last held-out bits per byte: {'; '.join(parts)}." if parts else ""
    return f"Two panels against training steps: training loss and held-out bits per byte.{last}"


def _say_overview(results: DemoResults) -> str:
    return " ".join(
        say(results)
        for say, shown in (
            (_say_position, _by_position(results)),
            (_say_memory, _with_memory(results)),
            (_say_recall, _recalling(results)),
        )
        if shown
    )


_PLANS = {
    "overview": _Plan(
        size=(_WIDE, 3.9),
        draw=_draw_overview,
        drawable=lambda r: bool(_by_position(r) or _with_memory(r) or _recalling(r)),
        caption="The three results in one picture: loss at positions beyond the training length, "
        "the memory that it takes, and recall of pairs.",
        alternative=_say_overview,
    ),
    "loss-by-position": _Plan(
        size=(_WIDTH, 4.4),
        draw=_draw_position,
        drawable=lambda r: bool(_by_position(r)),
        caption="Loss against the position in a held-out document, from an eighth of the training "
        "length on. The band is one standard error over documents. Right of the dotted line, the "
        "models are beyond any length that they were trained on.",
        alternative=_say_position,
    ),
    "recall-by-pairs": _Plan(
        size=(_WIDTH, 4.2),
        draw=_draw_recall,
        drawable=lambda r: bool(_recalling(r)),
        caption="Recall by length and number of pairs. A point is one seed, a bar the mean over "
        "seeds.",
        alternative=_say_recall,
    ),
    "memory": _Plan(
        size=(_WIDTH, 4.4),
        draw=_draw_memory,
        drawable=lambda r: bool(_with_memory(r)),
        caption="Bytes that one sequence holds after so many tokens, on logarithmic axes. The "
        "numbers on the right are the last points of the lines.",
        alternative=_say_memory,
    ),
    "training": _Plan(
        size=(_WIDE, 4),
        draw=_draw_training,
        drawable=lambda r: bool(_trained(r)),
        caption="Left: training loss, smoothed over a 25th of the run; the faint lines are single "
        "steps. Right: bits per byte on held-out text during training.",
        alternative=_say_training,
    ),
}
