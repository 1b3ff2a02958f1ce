"""The report of one run: its figures hold the numbers of its files, its page needs nothing else."""

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from meanbank.reports.canvas import png
from meanbank.reports.palette import ramp
from meanbank.reports.run import load_run, run_document, write_run_report
from meanbank.reports.run.curves import curve, thinned
from meanbank.reports.study.document import Prose, figures_of
from meanbank.reports.study.figure import Figure
from meanbank.reports.study.provenance import Facts

INFO = {
    "version": "9.8.7",
    "commit": "0123abc",
    "torch": "2.13.0",
    "device": "cpu",
    "seed": 5,
    "description": "KVM <small>",
    "parameters": 54321,
    "steps": 40,
    "sequence_length": 16,
    "data": {"source": "files:a", "tokens": {"train": 12345}},
}


def layer(number: int, step: int) -> dict:
    memory = {"memory": "kvm", "rows": 8, "dead_rows": 2.5, "append_similarity": None}
    learned = {"temperatures": {"state": [0.5, 1.0 + step / 10]}, "coefficients": {"bank": 0.25}}
    return {"layer": number, **(memory if number else {}), **learned, "products": {"bank": 0.75}}


def write_run(folder: Path, steps: int = 4, *, logged: bool = True) -> Path:
    """Losses fall by a half a step; the step 3 was done twice."""
    lines = []
    for step in [1, 2, 3, *range(3, steps + 1)]:
        line = {
            "step": step,
            "loss": 9.0 - step / 2,
            "gradient_norm": 100.0 / step,
            "tokens": 32 * step,
        }
        line |= {"tokens_per_second": 64.0, "forward_seconds": 0.3, "backward_seconds": 0.2}
        if logged and step % 2 == 0:
            line |= {"loss_at/0-1": float(step), "loss_at/2-3": 1.0, "loss_at/4-7": float("nan")}
        lines.append(line)
    lines.append({"step": steps, "held_out_bpb": 1.5})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"st')
    (folder / "run.json").write_text(json.dumps(INFO))
    if logged:
        told = [{"step": s, "tokens": 16, "layers": [layer(0, s), layer(1, s)]} for s in (4, 2, 2)]
        (folder / "statistics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in told))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "mine")


def figures(folder: Path) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(run_document(load_run(folder)))}


def rows(figure: Figure) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(figure.csv())))


def test_figures_hold_the_numbers_of_the_files(folder: Path) -> None:
    found = figures(folder)
    assert list(found) == [
        "loss", "optimizer", "speed", "step-split", "loss-by-position", "memory-statistics",
        "learned",
    ]  # fmt: skip
    loss = [(r["metric"], int(r["step"]), float(r["value"])) for r in rows(found["loss"])]
    assert loss == [*(("loss", s, 9 - s / 2) for s in (1, 2, 3, 4)), ("held_out_bpb", 4, 1.5)]
    assert "forward 60 %, backward 40 %" in found["step-split"].alternative
    assert {r["metric"] for r in rows(found["optimizer"])} == {"gradient_norm"}
    assert [tuple(r.values()) for r in rows(found["loss-by-position"])] == [
        ("2", "2", "0", "1", "2.0"),
        ("2", "2", "2", "3", "1.0"),
        ("4", "4", "0", "1", "4.0"),
        ("4", "4", "2", "3", "1.0"),
    ]
    used = [
        (r["panel"], r["layer"], r["step"], r["value"]) for r in rows(found["memory-statistics"])
    ]
    assert used == [
        ("rows", "1", "2", "8.0"),
        ("rows", "1", "4", "8.0"),
        ("rows of a single token", "1", "2", "2.5"),
        ("rows of a single token", "1", "4", "2.5"),
    ]
    learned = {(r["panel"], r["layer"], r["step"]): r for r in rows(found["learned"])}
    heads = learned["state temperature", "1", "4"]
    assert [float(heads[name]) for name in ("value", "low", "high")] == [0.95, 0.5, 1.4]
    assert learned["bank: coefficient", "0", "2"]["value"] == "0.25"
    assert learned["bank: coefficient × table", "0", "2"]["value"] == "0.75"
    for figure in found.values():
        assert len(figure.alternative) > 60


def test_positions_are_means_of_parts_of_training(tmp_path: Path) -> None:
    points = rows(figures(write_run(tmp_path / "long", steps=28))["loss-by-position"])
    first = [p for p in points if p["start"] == "0"]
    assert len(first) == 6  # 14 logged steps in six shares
    assert [(p["first"], p["last"]) for p in first][:2] == [("2", "4"), ("6", "8")]
    assert [float(p["loss"]) for p in first][:3] == [3.0, 7.0, 12.0]


def test_long_curves_are_thinned_to_means() -> None:
    points = [(step, float(step)) for step in range(1, 1001)]
    found = thinned(points)
    assert len(found) == 400
    assert found[:2] == ((2, 1.5), (5, 4.0))  # of steps 1 and 2, and of 3 to 5
    assert found[-1][0] == 1000
    assert thinned([]) == ()


def test_long_statistics_are_thinned_to_means(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long")
    lines = [
        {"step": s, "layers": [{"layer": 3, "rows": 2 * s, "budget": "x"}]} for s in range(120)
    ]
    (folder / "statistics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = rows(figures(folder)["memory-statistics"])
    assert len(points) == 60
    assert [(p["layer"], p["step"], float(p["value"])) for p in points[:2]] == [
        ("3", "1", 1.0), ("3", "3", 5.0)
    ]  # fmt: skip


def test_smoothing_is_for_long_curves(tmp_path: Path) -> None:
    short = load_run(write_run(tmp_path / "short"))
    assert all(point.smoothed is None for point in curve(short, "loss"))
    long = curve(load_run(write_run(tmp_path / "long", steps=50)), "loss")
    assert long[10].smoothed == pytest.approx(long[10].value)  # of a straight line, its middle


def test_every_figure_can_be_drawn(folder: Path, tmp_path: Path) -> None:
    found = [*figures(write_run(tmp_path / "long", steps=60)).values(), figures(folder)["loss"]]
    for figure in found:
        assert png((2, 2), figure.draw).startswith(b"\x89PNG")
        assert 0 < figure.height < 12


def test_the_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = png((1, 1), lambda canvas: None)
    monkeypatch.setattr("meanbank.reports.run.png", lambda size, draw: small)
    path = tmp_path / "new" / "page.html"
    write_run_report(folder, path, state="failed", reason="the loss is nan at step 5")
    page = path.read_text(encoding="utf-8")
    assert "<h1>mine: KVM &lt;small&gt;</h1>" in page
    for fact in (
        "failed: the loss is nan at step 5", "4 of 40", "128", "54,321", "16 tokens",
        "7.000 nats a token", "1.500 bits a byte after step 4", "64.0", "2.0 s", "0123abc",
        "12,345",
    ):  # fmt: skip
        assert f"<dd>{fact}</dd>" in page
    assert page.count('src="data:image/png;base64,') == 7
    assert "http:" not in page and "https:" not in page and "<script" not in page
    assert re.search(r"prefers-color-scheme: dark", page)


def test_what_was_not_logged_says_how(tmp_path: Path) -> None:
    sections = run_document(load_run(write_run(tmp_path / "plain", logged=False)))
    said = [b.paragraphs[0] for s in sections for b in s.blocks if isinstance(b, Prose)]
    assert len(said) == 2
    assert "training.position_loss_every=100" in said[0]
    assert "training.memory_statistics_every=100" in said[1]


def test_a_run_with_little(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (facts,) = [b for b in run_document(load_run(tmp_path))[0].blocks if isinstance(b, Facts)]
    assert dict(facts.items)["Steps"] == "1 of –"
    assert list(figures(tmp_path)) == ["loss"]
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no metrics yet"):
        load_run(tmp_path)


def test_colors_of_what_has_an_order() -> None:
    def light(color: str) -> float:
        red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert ramp(0) == []
    assert ramp(1) == ["#12355B"]
    for count in (2, 5, 30):
        shades = [light(color) for color in ramp(count)]
        assert len(shades) == count
        assert shades == sorted(shades, reverse=True)
        assert all(map(math.isfinite, shades))
