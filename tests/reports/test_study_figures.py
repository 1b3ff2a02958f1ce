"""What is drawn is what the CSV files say, and what the results said."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meanbank.reports.canvas import in_few_colors, png
from meanbank.reports.palette import STYLES, arm_styles, figure_style
from meanbank.reports.study import load_study
from meanbank.reports.study.curves import smoothed
from meanbank.reports.study.document import figures_of, study_document
from meanbank.reports.study.figure import Figure
from meanbank.reports.study.results import Study
from tests.reports.study_files import SEEDS, write_evaluation, write_json

FIGURES = [
    "claims",
    "recall-recall",
    "recall-mqar",
    "recall-mqar-distances",
    "recall-training",
    "recall-items",
    "recall-memory",
    "needle-bpb",
    "needle-position-loss",
    "needle-ruler",
    "needle-ruler-depths-niah_single",
    "needle-ruler-depths-niah_multikey",
    "needle-training",
    "needle-items",
    "needle-memory",
    "bank-bpb",
    "bank-training",
    "bank-parts",
    "bank-items",
    "bank-memory",
    "bank-memory-saved",
]


@pytest.fixture(scope="module")
def results(finished_study: Path) -> Study:
    return load_study(finished_study)


@pytest.fixture(scope="module")
def figures(results: Study) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(study_document(results))}


def rows(figure: Figure) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(figure.csv())))


def drawn(figure: Figure) -> Any:
    from matplotlib.figure import Figure as Canvas

    with figure_style():
        canvas = Canvas(figsize=figure.size)
        figure.draw(canvas)
    return canvas


def lines(axes: Any) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    for line in axes.lines:
        if not line.get_label().startswith("_"):
            yield line.get_label(), list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_every_figure_in_reading_order(figures: dict[str, Figure]) -> None:
    assert list(figures) == FIGURES
    for figure in figures.values():
        assert figure.caption.endswith(".") and len(figure.alternative) > 60
        assert "nan" not in figure.alternative and rows(figure)


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("needle-position-loss", "position", "loss"),
        ("recall-memory", "tokens", "bytes"),
    ],
)
def test_lines_are_the_numbers_of_the_file(figures, name: str, x: str, y: str) -> None:
    (axes,) = drawn(figures[name]).axes
    said: dict[str, list[tuple[float, float]]] = {}
    for row in rows(figures[name]):
        said.setdefault(row["arm"], []).append((float(row[x]), float(row[y])))
    assert dict(lines(axes)) == said and len(said) in (3, 5)


def test_the_band_goes_from_the_lowest_to_the_highest_seed(results, figures) -> None:
    full = results.groups[1].arms[0]
    buckets = [job.evaluations["position-loss"].results["buckets"][-1] for job in full.jobs]
    losses = [bucket["loss"] for bucket in buckets]
    last = [r for r in rows(figures["needle-position-loss"]) if r["arm"] == "needle_full"][-1]
    assert float(last["position"]) == 3584 and last["seeds"] == "3"
    assert float(last["loss"]) == pytest.approx(sum(losses) / 3)
    assert (float(last["low"]), float(last["high"])) == (min(losses), max(losses))
    first = rows(figures["needle-position-loss"])[0]
    assert float(first["position"]) == 96, "the first eighth of the training length is not shown"


def test_accuracy_is_a_point_a_seed_and_a_bar_for_the_mean(results, figures) -> None:
    figure = figures["recall-recall"]
    found = rows(figure)
    assert len(found) == 5 * (4 * 3 + 2), "one seed of one arm failed"
    (axes,) = drawn(figure).axes
    dots = [line for line in axes.lines if line.get_linestyle() == "None"]
    points = [y for line in dots for y in line.get_ydata()]
    assert sorted(points) == sorted(float(row["accuracy"]) for row in found)
    bars = {round(path.vertices[0][1], 9) for bar in axes.collections for path in bar.get_paths()}
    grid = [job.evaluations["recall"].results["grid"] for job in results.groups[0].arms[1].jobs]
    mean = sum(cells[4]["accuracy"] for cells in grid) / len(SEEDS)
    assert round(mean, 9) in bars


def test_heat_maps(figures) -> None:
    figure = figures["needle-ruler-depths-niah_single"]
    panels = [axes for axes in drawn(figure).axes if axes.images]
    assert len(panels) == 3
    for panel, arm in zip(panels, ("full", "window", "kvm"), strict=True):
        said = [float(r["score"]) for r in rows(figure) if r["arm"] == f"needle_{arm}"]
        assert panel.images[0].get_array().ravel().tolist() == said
    assert [text.get_text() for text in panels[2].get_xticklabels()] == ["512", "1K", "2K", "4K"]
    assert panels[2].get_yticklabels()[1].get_text() == "0.25"


def test_fields_of_a_heat_map_stand_in_order_whatever_is_missing(study: Path) -> None:
    """Depths are drawn at random: a length may lack the first of them, and an arm a length."""
    places = {
        "full": [(512, 0.5), (4096, 0.2), (1024, 0.7)],
        "window": [(512, 0.5)],
        "kvm": [(2048, 0.1), (1024, 0.9)],
    }
    for arm, found in places.items():
        depths = [{"task": "x", "length": n, "depth": d, "score": 1} for n, d in found]
        for run in (study / "runs" / f"needle_{arm}").glob("seed-*"):
            write_evaluation(run, "ruler", "ruler", {"rows": [], "depths": depths}, {})
    document = study_document(load_study(study))
    (figure,) = (f for f in figures_of(document) if f.name == "needle-ruler-depths-x")
    panels = [axes for axes in drawn(figure).axes if axes.images]
    assert [text.get_text() for text in panels[-1].get_xticklabels()] == ["512", "1K", "2K", "4K"]
    depths = ["0.1", "0.2", "0.5", "0.7", "0.9"]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == depths


def test_training_against_tokens_flops_and_time(figures) -> None:
    figure = figures["bank-training"]
    panels = drawn(figure).axes
    found = [row for row in rows(figure) if row["arm"] == "bank_bank"]
    for axes, name in zip(panels, ("tokens", "flops", "seconds"), strict=True):
        said = [(float(row[name]), float(row["bits_per_byte"])) for row in found]
        assert dict(lines(axes))["bank_bank"] == said
    assert [int(row["step"]) for row in found] == list(range(25, 301, 25))
    assert float(found[0]["tokens"]) == 25 * 4096
    assert float(found[0]["flops"]) == pytest.approx(1.2e13 * 1.1 * 25 / 300)
    assert float(found[0]["seconds"]) == pytest.approx(25 * 0.275)


def test_training_loss_where_there_is_no_text(figures) -> None:
    found = rows(figures["recall-training"])
    assert "loss" in found[0] and len(found) == 5 * 60 and found[-1]["step"] == "300"


def test_smoothing() -> None:
    assert smoothed([5.0]) == [5.0]
    values = [float(n) for n in range(50)]
    assert smoothed(values)[10] == pytest.approx(10) and smoothed(values)[0] == pytest.approx(0.5)


def test_parts(results, figures) -> None:
    found = [r for r in rows(figures["bank-parts"]) if r["arm"] == "bank_mixed"]
    assert [(r["layer"], r["part"]) for r in found[:2]] == [("0", "bank"), ("0", "contextual")]
    jobs = results.groups[2].arms[2].jobs
    parts = [j.evaluations["parts"].results["parts"] for j in jobs]
    banks = [next(p for p in one if p["layer"] == 0 and p["part"] == "bank") for one in parts]
    losses = [part["loss_without"] - part["loss_whole"] for part in banks]
    assert float(found[0]["product"]) == pytest.approx(sum(p["product"] for p in banks) / 3)
    assert float(found[0]["knock_out"]) == pytest.approx(sum(losses) / 3)
    assert float(found[0]["knock_out_high"]) == max(losses)
    assert found[1]["product"] == "", "a part that is no table has no such number"
    left, right = drawn(figures["bank-parts"]).axes[2:4]
    sizes, rises = dict(lines(left)), dict(lines(right))
    assert [y for _, y in sizes["bank, product"]] == [
        float(r["product"]) for r in found if r["part"] == "bank"
    ]
    assert [y for _, y in rises["contextual"]] == [
        float(r["knock_out"]) for r in found if r["part"] == "contextual"
    ]


def test_items(figures) -> None:
    figure = figures["bank-items"]
    (first, *_) = drawn(figure).axes
    (row, *_) = rows(figure)
    shares = [bar.get_width() for bar in first.patches][::2]  # of the first of two scores
    assert shares == pytest.approx([100 * int(row[n]) / 60 for n in ("wins", "ties", "losses")])
    assert sum(shares) == pytest.approx(100)


def test_memory_saved(figures) -> None:
    found = rows(figures["bank-memory-saved"])
    assert {row["arm"] for row in found} == {"bank_bank"}
    values, both = drawn(figures["bank-memory-saved"]).axes
    shares = [float(r["share"]) for r in found if (r["of"], r["batch"]) == ("of_values", "8")]
    assert [y for _, y in dict(lines(values))["('bank_bank', 8)"]] == shares
    assert shares[0] == 0.4375 and both.get_title(loc="left") == "of keys and values"


def test_claims(figures) -> None:
    strips = drawn(figures["claims"]).axes
    assert len(strips) == 4, "a claim that was not measured has none"
    marks = [row for row in rows(figures["claims"]) if row["claim"] == "growing-rescues-recall"]
    seeds = [float(row["value"]) for row in marks if row["what"] == "seed"]
    threshold, interval, dots, mean = strips[0].lines
    assert list(dots.get_xdata()) == seeds == [0.54, 0.556, 0.572]
    assert list(interval.get_xdata()) == [0.51, 0.602] and list(mean.get_xdata()) == [0.556]
    assert list(threshold.get_xdata()) == [0.3, 0.3]
    assert strips[0].get_title(loc="left").startswith("✓ holds: A growing memory")
    assert strips[0].patches[0].get_x() == 0.3, "at least: the right side is shaded"


def test_an_arm_keeps_a_look_of_its_own() -> None:
    groups = [["a", "full", *"bcdef"], [*"ghijkl", "a"], [f"m{n}" for n in range(20)]]
    styles = arm_styles(groups)
    assert styles["full"] == STYLES["full"]
    assert len(set(styles.values())) == len(styles) == 33
    assert len({styles[name].color for name in groups[0]}) == 7
    assert arm_styles(reversed(groups[:1])) == {name: styles[name] for name in groups[0]}


def test_pictures_are_real_and_small_ones_small(figures) -> None:
    from PIL import Image

    figure = figures["needle-position-loss"]
    whole = png(figure.size, figure.draw)
    picture = Image.open(io.BytesIO(whole))
    assert picture.width == round(150 * figure.size[0])
    assert len(set(picture.convert("L").tobytes())) > 20, "not blank"
    small = in_few_colors(whole)
    assert Image.open(io.BytesIO(small)).mode == "P" and len(small) < min(60_000, len(whole))


def test_figures_bear_odd_numbers(study: Path) -> None:
    nan = float("nan")
    run = study / "runs" / "needle_full" / "seed-11"
    buckets = [{"start": 0, "stop": 512, "loss": nan}, {"start": 512, "stop": 1024, "loss": nan}]
    write_evaluation(run, "position-loss", "position-loss", {"buckets": buckets}, {})
    write_evaluation(run, "memory", "memory", {"contexts": [{"tokens": 0, "bytes": 0}]}, {})
    write_evaluation(run, "ruler", "ruler", {"rows": [{"task": "x"}], "depths": [3]}, {})
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "held_out_bpb": 3}\n')
    claim = {"claim": "x", "mean": nan, "values": {"1": nan, "2": 1.0}, "interval": {"low": nan}}
    write_json(study / "verdicts.json", {"claims": [claim]})
    names = []
    for figure in figures_of(study_document(load_study(study))):
        if figure.name.startswith(("recall", "bank")):
            continue
        drawn(figure)
        names.append(figure.name)
    assert names[0] == "claims" and "needle-position-loss" in names
