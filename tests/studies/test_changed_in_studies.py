"""Studies whose arms are evaluated with other memories than in training."""

import json

import pytest

from meanbank.cli import main
from meanbank.reports.study import load_study as load_report
from meanbank.reports.study.document import study_document, study_tables_of
from meanbank.studies.report import report_study
from tests.studies.tiny_studies import InProcess, by_job, run, study_file

RECALL = {"type": "recall", "grid": [[32, 4]], "sequences": 8}
FIXED = {"type": "fixed", "count": 8}
POSTHOC = {
    "type": "kvm", "chunk_size": 8, "window_chunks": 1, "budget": FIXED,
    "temperatures": "none", "merge_gate": "none",
}  # fmt: skip


def group(*evaluations, arms=("recall_fixed", "recall_sqrt")):
    arms = {name.removeprefix("recall_"): f"quick/{name}" for name in arms}
    return {"arms": arms, "evaluations": [RECALL, *evaluations]}


def test_an_arm_changed_to_another_budget(tmp_path):
    change = {"type": "changed", "name": "recall-fixed8", "budget": FIXED, "evaluation": RECALL}
    claims = [{"claim": "recall-fixed8@32/4(sqrt) - recall@32/4(sqrt) < 0.1"}]
    file, out = study_file(tmp_path, group=group(change), claims=claims), tmp_path / "out"
    assert run(file, out).exit_code == 0
    fixed, sqrt = (by_job(out)[arm, 7] for arm in ("fixed", "sqrt"))
    # the arm with 8 rows is changed to what it is
    assert fixed["scores"]["recall-fixed8@32/4"] == fixed["scores"]["recall@32/4"]
    results = [json.loads((out / place).read_text()) for place in sqrt["evaluations"].values()]
    plain, changed = results
    assert changed["scores"] == {"recall-fixed8@32/4": changed["results"]["grid"][0]["accuracy"]}
    assert changed["results"]["change"] == {"layers": [0], "new": [], "dropped": []}
    assert (changed["task"], changed["name"]) == ("changed", "recall-fixed8")
    assert changed["prompt_hash"] == plain["prompt_hash"]
    costs = [each["costs"][0]["bytes"] for each in results]
    held = json.loads((out / fixed["evaluations"]["recall"]).read_text())["costs"][0]["bytes"]
    assert costs[1] == held < costs[0], "bytes are those of the changed model"
    launcher = InProcess()
    assert run(file, out, launcher).ran == 0
    assert launcher.started == []

    titles = [table.title for table in study_tables_of(load_report(out))]
    assert "Scores: recall-fixed8" in titles
    assert study_document(load_report(out))
    assert report_study(out).is_file()


def test_full_attention_with_kvm_at_inference_alone(tmp_path):
    change = {"type": "changed", "name": "posthoc", "memory": POSTHOC, "evaluation": RECALL}
    probe = {"type": "position-probe", "count": 4}
    kept = {**POSTHOC, "stored_rotary": "kept"}
    leak = {"type": "changed", "name": "leak", "memory": kept, "evaluation": probe}
    file = study_file(tmp_path, group=group(change, leak, arms=["recall_full"]))
    out = tmp_path / "out"
    assert run(file, out).exit_code == 0
    result = by_job(out)["full", 7]
    told = json.loads((out / result["evaluations"]["posthoc"]).read_text())
    norm = "model.layers.0.attention.memory.norm"
    names = [f"{norm}.weight", f"{norm}.bias"]
    assert told["results"]["change"] == {"layers": [0], "new": names, "dropped": []}
    probes = {f"leak:0.{name}" for name in ("read", "rotary", "content", "shuffled")}
    assert set(result["scores"]) == {"recall@32/4", "posthoc@32/4"} | probes
    assert report_study(out).is_file()
    assert "Scores: leak" in [table.title for table in study_tables_of(load_report(out))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": {**POSTHOC, "merge_gate": "learned"}}, "would start with random numbers"),
        ({"memory": POSTHOC, "where": [3]}, "there is no layer 3"),
        ({"budget": FIXED}, "nothing would be changed"),
        ({"memory": POSTHOC, "evaluation": {**RECALL, "grid": [[16, 9]]}}, "do not fit in 16"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_trained(change, words, tmp_path):
    settings = {"type": "changed", "name": "mine", "evaluation": RECALL, **change}
    file = study_file(tmp_path, group=group(settings, arms=["recall_full"]))
    launcher = InProcess()
    with pytest.raises(ValueError, match=f"mine does not fit arm full: .*{words}"):
        run(file, tmp_path / "out", launcher)
    assert launcher.started == []


def test_on_the_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    run(study_file(tmp_path, group=group(arms=["recall_sqrt"])), out)
    folder = out / "runs" / "sqrt" / "seed-7"
    budget = ["changed.budget.type=fixed", "changed.budget.count=8"]
    more = ["changed.evaluation.type=recall", "changed.evaluation.sequences=4"]
    grid = "changed.evaluation.grid=[[32, 4]]"

    def evaluate(*settings) -> int:
        arguments = ["evaluate", str(folder), "--task", "changed", "--set", *settings]
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        return int(stop.value.code or 0)

    assert evaluate(*budget, *more, grid) == 0
    assert "accuracy" in capsys.readouterr().out
    told = json.loads((folder / "evaluations" / "changed.json").read_text())
    assert set(told["scores"]) == {"changed@32/4"}
    for settings, words in [(budget, "'evaluation' is required"), (more, "give one of them")]:
        assert evaluate(*settings) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
