"""The table of where a run's time went."""

import json

from meanbank.reports.pace import pace_table


def write(run, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"step": 4, "tokens_per_sec')


def test_medians_of_shares(tmp_path):
    steps = [
        # speed, utilisation, data, forward, logging
        (100.0, 0.5, 1.0, 8.0, 1.0),
        (300.0, 0.7, 0.0, 3.0, 1.0),
        (200.0, 0.6, 1.0, 1.0, 0.0),
    ]
    lines = [
        {
            "step": step,
            "tokens_per_second": speed,
            "utilization": used,
            "data_seconds": data,
            "forward_seconds": forward,
            "logging_seconds": logging,
            "seconds": 99.0,
        }
        for step, (speed, used, data, forward, logging) in enumerate(steps, start=1)
    ]
    write(tmp_path, [*lines, {"step": 3, "held_out_bpb": 1.0}])
    table = pace_table(tmp_path)
    assert table.columns == ("tok/s", "Utilisation", "Data", "Forward", "Logging")
    # shares: data 0.1, 0, 0.5; forward 0.8, 0.75, 0.5; logging 0.1, 0.25, 0
    assert [row.cells for row in table.rows] == [("200", "60 %", "10.0 %", "75.0 %", "10.0 %")]
    assert "over 3 steps" in table.meaning[0]


def test_what_earlier_versions_left(tmp_path):
    assert pace_table(tmp_path) is None
    write(tmp_path, [{"step": 1, "tokens_per_second": 50.0}])
    assert pace_table(tmp_path) is None
    write(tmp_path, [{"step": 1, "tokens_per_second": 50.0, "data_seconds": 2.0}])
    (row,) = pace_table(tmp_path).rows
    assert row.cells == ("50.0", "–", "100.0 %")
