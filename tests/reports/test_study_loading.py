import json
from pathlib import Path

import pytest

from meanbank.reports.study import load_study
from tests.reports.study_files import SEEDS, write_json, write_lines


def test_reads_a_complete_study(study: Path) -> None:
    found = load_study(study)
    assert found.title == "Small study of memories and banks"
    assert (found.seeds, found.tuning_seeds) == (SEEDS, (7,))
    assert [group.name for group in found.groups] == ["recall", "needle", "bank"]
    recall = found.groups[0]
    assert [arm.name for arm in recall.arms][:2] == ["full", "kvm_fixed"]
    full = recall.arms[0]
    assert full.label == "Full attention"
    assert [job.seed for job in full.jobs] == list(SEEDS), "tuning seeds count in nothing"
    assert [job.seed for job in full.tuning] == [7]
    assert recall.titles("recall") == ["recall"] and recall.titles("ruler") == []
    first = full.jobs[0].evaluations["recall"]
    assert first.prompt_hash == "0011223344556677"
    (one, *_) = recall.comparisons
    assert (one.arm, one.against, one.score) == ("full", "kvm_fixed", "recall@128/12")
    assert (one.wins, one.ties, one.losses, one.low, one.high) == (20, 35, 5, 0.1, 0.4)
    assert len(full.jobs[0].steps) == 300 and full.jobs[0].run["steps"] == 300


def test_claims(study: Path) -> None:
    growing, bank, *_, unmeasured = load_study(study).claims
    assert growing.interval == (0.51, 0.602) and growing.values["13"] == 0.572
    assert bank.bootstrap is None and bank.notes == ("Added after results existed.",)
    assert unmeasured.mean is None and unmeasured.interval is None


def test_intervals_have_two_ends(study: Path) -> None:
    half = {"low": None, "high": 0.5, "kind": "t"}
    record = {"claim": "a", "interval": half, "bootstrap": [0.1, 0.2], "added": True}
    write_json(study / "verdicts.json", {"claims": [record]})
    (claim,) = load_study(study).claims
    assert claim.interval is None and claim.bootstrap is None
    assert claim.verdict == "not measured"
    assert claim.notes == ("added or changed when there were results already",)


def test_a_group_has_seeds_of_its_own(study: Path) -> None:
    plan = json.loads((study / "study.yaml").read_text())
    for settings in plan["groups"]["bank"]["arms"].values():
        settings["seeds"] = list(SEEDS[:2])
    write_json(study / "study.yaml", plan)
    (failed,) = load_study(study).absent
    assert failed.arm == "no_gate"


def test_failed_and_missing_runs(study: Path) -> None:
    failed, missing = load_study(study).absent
    assert (failed.arm, failed.seed) == ("no_gate", 13)
    assert failed.reason == "the loss is nan at step 41, first in layers.1.attention"
    assert (missing.arm, missing.seed, missing.reason) == ("bank_first", 13, None)


def test_steps_are_put_together_and_time_goes_on_after_a_pause(study: Path) -> None:
    lines = [
        {"step": 1, "loss": 3.0, "tokens": 10, "seconds": 5.0},
        {"step": 2, "loss": 2.0, "tokens": 20, "seconds": 9.0},
        {"step": 2, "held_out_bpb": 1.5},
        {"step": 3, "loss": 1.0, "tokens": 30, "seconds": 4.0},  # taken up again
    ]
    metrics = study / "runs" / "full" / "seed-11" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    first, second, third = load_study(study).groups[0].arms[0].jobs[0].steps
    assert (first.loss, first.held_out, first.seconds) == (3.0, None, 5.0)
    assert (second.loss, second.held_out, second.seconds) == (2.0, 1.5, 9.0)
    assert (third.tokens, third.seconds) == (30, 13.0)


def test_the_later_line_of_a_job_counts(study: Path) -> None:
    line = {"group": "bank", "arm": "bank_first", "seed": 13, "scores": {"bpb": 9.0}}
    with (study / "results.jsonl").open("a") as file:
        file.write(json.dumps({**line, "scores": {"bpb": 8.0}}) + "\n" + json.dumps(line) + "\n")
    found = load_study(study)
    assert found.groups[2].arms[3].values("bpb")[13] == 9.0
    assert [job.arm for job in found.absent] == ["no_gate"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_a_study_is_named(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(ValueError, match=r"there is no study in .*nothing") as caught:
        load_study(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("study.yaml", "study.yaml is not valid YAML"),
        ("verdicts.json", "verdicts.json is not valid JSON"),
        ("runs/full/seed-11/evaluations/recall.json", "recall.json is not valid JSON"),
    ],
)
def test_a_damaged_file_is_named(study: Path, file: str, said: str) -> None:
    (study / file).write_text('{"task": [')
    with pytest.raises(ValueError, match=said) as caught:
        load_study(study)
    assert "\n" not in str(caught.value)


def test_nothing_outside_the_folder_is_read(study: Path) -> None:
    write_json(study.parent / "outside.json", {"task": "bpb", "results": {}})
    line = {"group": "bank", "arm": "bank_first", "seed": 13}
    outside = {"bpb": "../outside.json", "core": str(study.parent / "outside.json"), "x": 3}
    write_lines(study / "results.jsonl", [{**line, "evaluations": outside}])
    assert load_study(study).groups[2].arms[3].jobs[0].evaluations == {}


def test_values_of_the_wrong_kind_count_as_missing(tmp_path: Path) -> None:
    plan = {"title": 3, "seeds": "all", "groups": {"a": {"arms": {"b": None}}, "c": []}}
    write_json(tmp_path / "study.yaml", plan)
    write_json(tmp_path / "verdicts.json", [1])
    job = {"group": "a", "arm": "b", "seed": 1, "parameters": "many", "scores": {"x": "low"}}
    write_lines(tmp_path / "results.jsonl", [{**job, "evaluations": 7}, {"group": "a", "arm": "b"}])
    found = load_study(tmp_path)
    assert found.title == "3" and found.seeds == () and found.claims == ()
    (only,) = found.groups[0].arms[0].jobs
    assert only.parameters is None and only.scores == {}
