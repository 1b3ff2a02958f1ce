"""The curves of one run: small lines of blocks, and a figure."""

import json

import pytest

from meanbank.reports.curves import curve_table, draw_curves, run_curves, sparkline


@pytest.fixture
def folder(tmp_path):
    lines = [{"step": step, "loss": 4.0 - step / 2, "gradient_norm": 1.0} for step in range(1, 5)]
    lines.insert(2, {"step": 2, "held_out_bpb": 1.25})
    lines.append({"step": 4, "loss": 7.0, "gradient_norm": float("nan")})  # done again
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "lo')
    return tmp_path


def test_lines_of_blocks():
    assert sparkline([0.0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([7.0, 0.0]) == "█▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0, float("nan"), 7.0, float("inf")]) == "▁ █ "
    assert sparkline([float("nan")]) == " "
    assert sparkline([]) == ""
    assert sparkline([0.0, 2.0, 8.0, 6.0, 7.0], width=2) == "▁█"  # means 1 and 7


def test_curves_and_their_figures(folder):
    curves = run_curves(folder)
    assert list(curves) == ["loss", "held_out_bpb", "gradient_norm"]
    assert curves["loss"] == ((1, 3.5), (2, 3.0), (3, 2.5), (4, 7.0))
    assert curves["held_out_bpb"] == ((2, 1.25),)
    rows = {row.cells[0]: row.cells[1:] for row in curve_table(folder).rows}
    assert rows["loss (nats)"] == ("▃▂▁█", "3.5", "2.5", "7")
    assert rows["gradient norm"] == ("▁▁▁ ", "1", "1", "nan")


def test_a_figure(folder, tmp_path):
    draw_curves(folder, tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_metrics(tmp_path):
    with pytest.raises(ValueError, match="has no metrics yet"):
        run_curves(tmp_path)
