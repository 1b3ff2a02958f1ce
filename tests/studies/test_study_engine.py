"""Studies as they run: what is done once, what is done again, and what survives any crash."""

import json
import multiprocessing
import os
import signal
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from meanbank.cli import main
from meanbank.core.files import locked
from meanbank.data import prepare_corpus
from meanbank.studies.job import find_job
from meanbank.studies.report import report_study
from meanbank.studies.results import keep_result, read_results
from tests.studies.tiny_studies import InProcess, by_job, outcome_of, run, study_file


def test_a_study_leaves_everything_needed(tmp_path):
    file = study_file(
        tmp_path, tuning_seeds=[0], claims=[{"claim": "weights-for-tests(fixed) > 0"}]
    )
    out, launcher = tmp_path / "out", InProcess()
    outcome = run(file, out, launcher)
    assert (outcome.exit_code, outcome.finished, outcome.ran) == (0, 4, 4)
    # the arm that costs more first
    assert launcher.started == ["grows seed 7", "grows seed 0", "fixed seed 7", "fixed seed 0"]
    results = by_job(out)
    assert {key: result["tuning"] for key, result in results.items()} == {
        ("grows", 7): False,
        ("grows", 0): True,
        ("fixed", 7): False,
        ("fixed", 0): True,
    }
    result = results["fixed", 7]
    folder = out / "runs" / "fixed" / "seed-7"
    assert result == json.loads((folder / "result.json").read_text())
    assert (result["study"], result["group"], result["label"]) == ("tiny", "recall", "KVM 8 rows")
    assert result["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    assert result["config"]["training"]["seed"] == result["produced_by"]["seed"] == 7
    assert result["tokens"] == 4 * (2 * 16 + 32)
    saved = load_file(folder / "checkpoints" / "step-000003" / "model.safetensors")
    assert result["parameters"] == sum(tensor.numel() for tensor in saved.values())
    total = sum(tensor.double().sum().item() for tensor in saved.values())
    assert result["scores"] == {
        "weights-for-tests": pytest.approx(total),
        "weights-for-tests@2": 1.0,
    }
    evaluation = json.loads((out / result["evaluations"]["weights-for-tests"]).read_text())
    assert evaluation["scores"] == result["scores"]
    assert (out / result["curve"]).is_file()
    assert result["seconds"]["training"] > 0
    claims = json.loads((out / "claims.json").read_text())
    assert [claim["claim"] for claim in claims] == ["weights-for-tests(fixed) > 0"]


def test_a_second_run_does_what_is_missing_and_no_more(tmp_path):
    out, file = tmp_path / "out", study_file(tmp_path)
    run(file, out, only=["fixed"])
    assert set(by_job(out)) == {("fixed", 7)}
    launcher = InProcess()
    assert run(file, out, launcher).finished == 2
    assert launcher.started == ["grows seed 7"]
    before = (out / "results.jsonl").read_bytes()
    launcher = InProcess()
    assert run(file, out, launcher).ran == 0
    assert launcher.started == []
    assert (out / "results.jsonl").read_bytes() == before
    more = study_file(tmp_path, seeds=[7, 8])
    launcher = InProcess()
    run(more, out, launcher, tuning=False)
    assert launcher.started == ["grows seed 8", "fixed seed 8"]


def test_changed_evaluations_alone_are_done_again(tmp_path):
    out = tmp_path / "out"
    run(study_file(tmp_path), out)
    weights = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    first = {path: path.stat().st_mtime_ns for path in out.rglob("weights-for-tests.json")}
    assert len(first) == 2
    again = ["weights-for-tests", {"type": "weights-for-tests", "name": "more"}]
    assert run(study_file(tmp_path, group={"evaluations": again}), out).ran == 2
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    assert {path: path.stat().st_mtime_ns for path in first} == first
    for result in read_results(out):
        assert set(result["scores"]) == {
            "weights-for-tests", "weights-for-tests@2", "more", "more@2"
        }  # fmt: skip
    assert len((out / "results.jsonl").read_text().splitlines()) == 2


def test_claims_are_kept_as_they_were_before_there_were_results(tmp_path):
    out = tmp_path / "out"
    claims = [[{"claim": f"weights-for-tests(fixed) > {number}"}] for number in range(3)]
    run(study_file(tmp_path, claims=claims[0]), out, InProcess(broken=("grows", "fixed")))
    run(study_file(tmp_path, claims=claims[1]), out)
    run(study_file(tmp_path, claims=claims[2]), out)
    kept = json.loads((out / "claims.json").read_text())
    assert [claim["claim"] for claim in kept] == ["weights-for-tests(fixed) > 1"]
    now = yaml.safe_load((out / "study.yaml").read_text())["claims"]
    assert [claim["claim"] for claim in now] == ["weights-for-tests(fixed) > 2"]


def test_claims_that_came_or_changed_after_results_are_marked(tmp_path):
    """Also one that is now about each seed: that is judged by another rule."""
    out, claim = tmp_path / "out", "weights-for-tests(fixed) > {}"
    first = [{"claim": claim.format(0)}, {"claim": claim.format(1)}]
    run(study_file(tmp_path, claims=first), out)
    later = [
        {"claim": claim.format(0), "says": "Only its words are others."},
        {"claim": claim.format(1), "each": True},
        {"claim": claim.format(2)},
    ]
    run(study_file(tmp_path, claims=later), out)
    report_study(out)
    judged = json.loads((out / "verdicts.json").read_text())["claims"]
    assert [each["added"] for each in judged] == [False, True, True]


def test_texts_are_prepared_once_before_any_job(config_file, tmp_path, monkeypatch):
    prepared, launcher = [], InProcess()

    def prepare(data):
        assert not launcher.started
        prepared.append(data)
        return prepare_corpus(data)

    monkeypatch.setattr("meanbank.studies.engine.prepare_corpus", prepare)
    arms = {"first": {}, "second": {"overrides": ["model.hidden_size=16"]}}
    texts = {"config": str(config_file), "overrides": ["training.steps=2"], "arms": arms}
    outcome = run(study_file(tmp_path, group=texts), tmp_path / "out", launcher)
    assert (outcome.finished, len(prepared)) == (2, 1)
    assert {result["tokens"] for result in read_results(tmp_path / "out")} == {2 * 2 * 32}


def test_what_measures_time_comes_last_and_alone(tmp_path):
    evaluations = ["timed-for-tests", "weights-for-tests"]
    file, launcher = study_file(tmp_path, group={"evaluations": evaluations}), InProcess()
    assert run(file, tmp_path / "out", launcher).finished == 2
    beside = ["grows seed 7", "fixed seed 7"]
    assert launcher.started == [*beside, *(f"{name} alone" for name in beside)]
    assert all("timed-for-tests" in result["scores"] for result in read_results(tmp_path / "out"))


def test_runs_of_other_settings_are_refused_and_made_anew_with_force(tmp_path):
    out = tmp_path / "out"
    run(study_file(tmp_path), out)
    arms = {
        "grows": "quick/recall_sqrt",
        "fixed": {"config": "quick/recall_fixed", "overrides": ["data.batch_size=2"]},
    }
    changed = study_file(tmp_path, group={"arms": arms})
    message = r"fixed/seed-7: it was made with data.batch_size = 4, not 2; --force makes arm fixed"
    with pytest.raises(ValueError, match=message) as error:
        run(changed, out)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        run(changed, out, only=["grows"], force=True)  # it would stay as it is
    assert by_job(out)["fixed", 7]["tokens"] == 4 * 64
    launcher = InProcess()
    run(changed, out, launcher, force=True)
    assert launcher.started == ["fixed seed 7"]
    assert by_job(out)["fixed", 7]["tokens"] == 2 * 64
    assert not list((out / "runs" / "fixed").glob(".*.old"))


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ("bpb", "arm grows has no texts to be evaluated on"),
        ({"type": "recall", "grid": [[16, 9]]}, "9 pairs do not fit in 16 tokens"),
        ({"type": "memory", "contexts": [8, 8]}, "8 twice"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_anything_is_trained(evaluation, words, tmp_path):
    file, out = study_file(tmp_path, group={"evaluations": [evaluation]}), tmp_path / "out"
    launcher = InProcess()
    with pytest.raises(ValueError, match=f"does not fit arm grows: .*{words}"):
        run(file, out, launcher)
    assert (launcher.started, out.exists()) == ([], False)


def test_parts_are_looked_for_before_anything_is_trained(config_file, tmp_path):
    overrides = ["training.steps=2", "training.warmup_steps=1", "training.device=cpu"]
    arms = {"bank": {}, "full": {"overrides": ["model.plan=[{memory: full}]"]}}
    group = {"config": str(config_file), "overrides": overrides, "arms": arms}
    file = study_file(tmp_path, group={**group, "evaluations": ["bpb", "parts"]})
    with pytest.raises(ValueError, match=r"parts does not fit arm full: .* no parts"):
        run(file, tmp_path / "out")
    assert run(file, tmp_path / "out", only=["bank"]).finished == 1


def test_evaluating_a_run_by_hand_changes_nothing_of_its_study(tmp_path):
    memory = {"type": "memory", "contexts": [8]}
    file, out = study_file(tmp_path, group={"evaluations": [memory]}), tmp_path / "out"
    run(file, out)
    before = outcome_of(out), {p: p.read_bytes() for p in out.rglob("evaluated/*")}
    assert len(before[1]) == 2 * 2
    for arm in ("grows", "fixed"):
        command = ["evaluate", str(out / "runs" / arm / "seed-7"), "--task", "memory"]
        with pytest.raises(SystemExit) as stop:
            main([*command, "--set", "memory.contexts=[16]"])
        assert stop.value.code == 0
    assert (outcome_of(out), {p: p.read_bytes() for p in out.rglob("evaluated/*")}) == before
    launcher = InProcess()
    assert (run(file, out, launcher).finished, launcher.started) == (2, [])


@pytest.mark.parametrize("end", [".json", ".records.jsonl"])
def test_a_lost_file_of_an_evaluation_is_made_again_without_training(end, tmp_path):
    file, out, launcher = study_file(tmp_path), tmp_path / "out", InProcess()
    run(file, out)
    before = outcome_of(out)
    (lost,) = (out / "runs" / "fixed").rglob(f"weights-for-tests{end}")
    lost.unlink()
    report_study(out)  # what is left, without this run
    assert run(file, out, launcher).finished == 2
    assert (launcher.started, outcome_of(out), lost.is_file()) == (["fixed seed 7"], before, True)


@pytest.mark.parametrize(
    "torn", [b"", b"{}\n[1]\n", b'{}\n{"id": 3', b'{}\n{"scores": {"a": 1}}\n']
)
def test_records_that_were_changed_are_told_of(torn, tmp_path):
    file, out = study_file(tmp_path), tmp_path / "out"
    run(file, out)
    (records,) = (out / "runs" / "fixed").rglob("*.records.jsonl")
    records.write_bytes(torn)
    with pytest.raises(ValueError, match=f"{records} was changed or torn; remove it, and"):
        report_study(out)


@pytest.mark.parametrize("content", ["", "3", "[3]", "[{}]", '[{"claim": "x"}]'])
def test_claims_that_were_changed_are_told_of(content, tmp_path):
    file, out = study_file(tmp_path), tmp_path / "out"
    run(file, out)
    (out / "claims.json").write_text(content)
    with pytest.raises(ValueError, match=str(out / "claims.json")):
        report_study(out)


@pytest.mark.parametrize("name", ["evaluated.json", "result.json"])
def test_files_of_a_run_that_were_changed_are_told_of(name, tmp_path):
    file, out = study_file(tmp_path), tmp_path / "out"
    run(file, out)
    path = out / "runs" / "fixed" / "seed-7" / name
    for content in ("[]", "{", "3"):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{path} "):
            run(file, out)
    path.write_text("{}")
    assert run(file, out).finished == 2


def test_a_failed_job_leaves_the_others_alone(tmp_path, capsys, monkeypatch):
    file, out = study_file(tmp_path, seeds=[1, 2]), tmp_path / "out"
    outcome = run(file, out, InProcess(broken=("grows",)))
    assert (outcome.exit_code, outcome.finished) == (1, 2)
    assert [(each["arm"], each["seed"]) for each in outcome.failed] == [("grows", 1), ("grows", 2)]
    failure = json.loads((out / "runs" / "grows" / "seed-1" / "failure.json").read_text())
    assert failure["message"] == "the loss is nan at step 2"
    assert failure["code"] == 2
    assert (out / failure["log"]).is_file()
    assert set(by_job(out)) == {("fixed", 1), ("fixed", 2)}
    monkeypatch.setattr("meanbank.studies.launch.Processes", lambda jobs: InProcess(("grows",)))
    with pytest.raises(SystemExit) as stop:
        main(["study", "run", str(file), "--out", str(out)])
    shown = capsys.readouterr().out
    assert stop.value.code == 1
    assert shown.count("the loss is nan at step 2") == 1 and "1 and 2" in shown  # alike: one line
    assert "2 runs finished, 2 failed" in shown
    assert run(file, out).finished == 4
    assert not list(out.rglob("failure.json"))


def test_a_folder_in_use_or_of_something_else_is_refused(tmp_path):
    file, out = study_file(tmp_path), tmp_path / "out"
    with locked(out / ".lock"), pytest.raises(ValueError, match="is in use: another"):
        run(file, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        run(file, out)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "notes.txt"]
    with pytest.raises(ValueError, match="unknown arm 'fix'; choose one of fixed"):
        run(file, tmp_path / "new", only=["fix"])
    with pytest.raises(ValueError, match="is not the folder of a study"):
        find_job(tmp_path / "new", "fixed", 7)


def test_results_are_one_line_a_job_whatever_was_torn(tmp_path):
    lines = [{"arm": arm, "seed": seed, "x": 0} for arm in "ab" for seed in (1, 2)]
    for line in lines:
        keep_result(tmp_path, line)
    assert read_results(tmp_path) == lines
    file = tmp_path / "results.jsonl"
    whole = file.read_bytes()
    for cut in (1, 10, len(whole) // 2 + 3, len(whole) - 1):
        file.write_bytes(whole[:cut])
        for line in lines:
            keep_result(tmp_path, line)
        assert sorted(map(str, read_results(tmp_path))) == sorted(map(str, lines))
        assert len(file.read_bytes().splitlines()) == 4
    for odd in (
        b"[1]",
        b"{}",
        b"null",
        b'{"arm": [], "seed": 1}',
        b"\xff",
        b"9" * 5000,
        b'{"arm": "a", "seed": 1, "x": NaN}',
        b'{"arm": "a", "seed": 2, "x": 1e999}',
    ):
        file.write_bytes(file.read_bytes() + odd + b"\n")
    keep_result(tmp_path, lines[3])
    assert sorted(map(str, read_results(tmp_path))) == sorted(map(str, lines))
    assert len(file.read_bytes().splitlines()) == 4
    keep_result(tmp_path, {**lines[0], "x": 1})
    assert by_job(tmp_path)["a", 1]["x"] == 1
    assert len(file.read_bytes().splitlines()) == 4


def _keep_many(folder, arm, count):
    for seed in range(count):
        keep_result(folder, {"arm": arm, "seed": seed, "padding": "x" * 9999})


def _killed_after(file, out, events):
    """Run a study; SIGKILL this process at its so-many-th look at a file below `out`."""
    torch.set_num_threads(1)
    left = [events]

    def count(event, arguments):
        if event.startswith(("open", "os.", "shutil.", "fcntl.")) and str(out) in str(arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    sys.stderr = sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.exit(run(file, out).exit_code)


@pytest.fixture(scope="module")
def forked():
    """Runs a function in a process that has loaded everything and done nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.studies.test_study_engine"])

    def start(function, *arguments):
        process = context.Process(target=function, args=arguments)
        process.start()
        return process

    return start


def test_results_may_be_kept_by_several_processes_at_a_time(forked, tmp_path):
    processes = [forked(_keep_many, tmp_path, arm, 20) for arm in "abc"]
    for process in processes:
        process.join()
    assert len(read_results(tmp_path)) == 60
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 60


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_study_that_is_killed_anywhere_comes_to_the_same_end(stride, forked, tmp_path):
    """Killed at one file operation after another, each time a little later."""
    file = study_file(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = forked(_killed_after, file, whole, 0)
    process.join()
    assert process.exitcode == 0
    kills, code = 0, -signal.SIGKILL
    while code != 0:
        process = forked(_killed_after, file, killed, 1 + stride * kills)
        process.join()
        code = process.exitcode
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
    assert kills > 4
    assert outcome_of(killed) == outcome_of(whole)
    assert len(outcome_of(whole)) == 2


def test_records_are_of_one_version_of_the_code_on_one_device(tmp_path):
    file, out = study_file(tmp_path), tmp_path / "out"
    run(file, out)
    (records,) = (out / "runs" / "fixed").rglob("*.records.jsonl")
    result = json.loads(records.with_name("weights-for-tests.json").read_text())
    made_by = result["produced_by"]
    header = json.loads(records.read_text().splitlines()[0])
    how = f"{made_by['version']} {made_by['commit']} {made_by['device']} torch.{made_by['dtype']}"
    assert header["identity"] == f"{result['identity']} {how}"


def test_results_are_those_of_the_study_as_it_is_now(tmp_path):
    out, both = tmp_path / "out", {"seeds": [7, 8]}
    run(study_file(tmp_path, **both), out)
    assert len(read_results(out)) == 4
    settings = yaml.safe_load(study_file(tmp_path, **both).read_text())
    settings["groups"] = {"renamed": settings["groups"]["recall"]}
    settings["tuning_seeds"], settings["seeds"] = [8], [7]
    file = tmp_path / "renamed.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert run(file, out).ran == 0
    found = {key: (each["group"], each["tuning"]) for key, each in by_job(out).items()}
    assert found == {
        (arm, seed): ("renamed", seed == 8) for arm in ("grows", "fixed") for seed in (7, 8)
    }
    assert run(study_file(tmp_path), out).ran == 0  # there is no seed 8 any more
    assert {seed for _, seed in by_job(out)} == {7}
    more = {"evaluations": ["weights-for-tests", {"type": "weights-for-tests", "name": "more"}]}
    run(study_file(tmp_path, group=more), out, only=["grows"])
    assert [*by_job(out)] == [("grows", 7)]  # the other arm is not finished as the study says
