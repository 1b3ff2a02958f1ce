"""Arms that are models from elsewhere: nothing is trained, all else is as for runs."""

import json

import pytest
import yaml
from safetensors.torch import load_file, save_file

from meanbank.cli import main
from meanbank.core.bundled import read_yaml
from meanbank.reports.study import load_study as load_results
from meanbank.studies.comparisons import compare_arms
from meanbank.studies.evaluations import place_of
from meanbank.studies.report import report_study
from meanbank.studies.resolve import load_study, read_study
from meanbank.studies.verdicts import ClaimSpec, RunScores, judge
from tests.cli.model_folders import save_llama
from tests.studies.tiny_studies import InProcess, by_job, run, study_file


@pytest.fixture
def llama(tmp_path, corpus):
    return save_llama(tmp_path / "llama", corpus)


def text_study(folder, corpus, **changes):
    """A study of the model `llama` beside it, on texts, and of a run that has none."""
    model = {"name": "llama", "data": f"files:{corpus}/*.txt"}
    arms = {
        "run": {"config": "quick/recall_fixed"},
        "llama": {"model": model, "evaluations": [{"type": "bpb", "max_tokens": 300}]},
    }
    return study_file(folder, **{"seeds": [7, 8], "group": {"arms": arms}, **changes})


def sum_of(llama):
    return sum(t.double().sum().item() for t in load_file(llama / "model.safetensors").values())


def test_a_model_is_evaluated_once_and_as_it_is(llama, corpus, tmp_path):
    claims = [
        {"claim": "bpb(llama) > 0", "each": True},
        {"claim": "bpb(llama) > 0"},
        {"claim": "weights-for-tests@2(run) - weights-for-tests@2(llama) >= 0", "each": True},
    ]
    file, out = text_study(tmp_path, corpus, claims=claims, tuning_seeds=[1]), tmp_path / "out"
    launcher = InProcess()
    assert run(file, out, launcher).finished == 4
    assert sorted(launcher.started) == ["llama seed 7", "run seed 1", "run seed 7", "run seed 8"]
    result = by_job(out)["llama", 7]
    weights = load_file(llama / "model.safetensors")
    assert result["scores"]["weights-for-tests"] == pytest.approx(sum_of(llama))
    assert result["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert (result["tokens"], result["flops"], result["curve"]) == (None, None, None)
    assert (result["seconds"]["training"], result["tuning"]) == (None, False)
    assert result["model"]["name"] == str(llama)
    assert result["produced_by"]["device"] == "cpu"
    assert result["produced_by"]["dtype"] == "float32"
    assert by_job(out)["run", 7]["model"] is None
    folder = out / "runs" / "llama" / "seed-7"
    assert not list(folder.rglob("*.safetensors")) and not (folder / "config.yaml").exists()

    with pytest.raises(SystemExit):  # the same by the other verb
        source = f"files:{corpus}/*.txt"
        more = ["--data", source, "--set", "bpb.max_tokens=300", "--out", str(tmp_path / "one")]
        main(["evaluate", str(llama), "--task", "bpb", *more])
    alone = json.loads((tmp_path / "one" / "bpb.json").read_text())
    kept = json.loads((out / result["evaluations"]["bpb"]).read_text())
    assert kept["scores"] == alone["scores"] == {"bpb": result["scores"]["bpb"]}
    assert (kept["identity"], kept["data"]) == (alone["identity"], alone["data"])

    report = report_study(out).read_text()
    assert "not trained here" in report and result["model"]["fingerprint"][:12] in report
    verdicts = json.loads((out / "verdicts.json").read_text())["claims"]
    assert [v["verdict"] for v in verdicts] == ["holds", "not testable", "undecided"]
    assert verdicts[2]["values"] == {"7": 0.0, "8": 0.0}
    (group,) = load_results(out).groups
    assert [arm.is_trained_here for arm in group.arms] == [True, False]
    assert not load_results(out).absent
    (out / "results.jsonl").unlink()
    (group,) = load_results(out).groups
    assert [arm.is_trained_here for arm in group.arms] == [True, False]


def test_a_study_of_models_alone_is_reported(llama, corpus, tmp_path, capsys):
    file = text_study(tmp_path, corpus)
    with pytest.raises(SystemExit) as stop:
        main(["study", "show", str(file)])
    assert (stop.value.code, "3 runs in all" in capsys.readouterr().out) == (0, True)
    out = tmp_path / "out"
    run(file, out, only=["llama"])
    only = read_yaml("study", file)
    del only["groups"]["recall"]["arms"]["run"]
    file.write_text(yaml.safe_dump(only))
    launcher = InProcess()
    assert (run(file, out, launcher).finished, launcher.started) == (1, [])
    page = report_study(out).read_text()
    assert "models that existed before" in page
    assert "Held-out" not in page and "a single seed" not in page


def test_what_a_stopped_evaluation_left_is_used(llama, corpus, tmp_path):
    out = tmp_path / "out"
    run(text_study(tmp_path, corpus), out, only=["llama"])
    folder = out / "runs" / "llama" / "seed-7"
    kept = (folder / "evaluated" / "weights-for-tests.json").read_bytes()
    evaluated = json.loads((folder / "evaluated.json").read_text())
    del evaluated["bpb"]
    (folder / "evaluated.json").write_text(json.dumps(evaluated))
    (folder / "result.json").unlink()
    launcher = InProcess()
    assert run(text_study(tmp_path, corpus), out, launcher, only=["llama"]).finished == 1
    assert launcher.started == ["llama seed 7"]
    assert (folder / "evaluated" / "weights-for-tests.json").read_bytes() == kept


@pytest.mark.parametrize("what", ["weights", "texts", "bos"])
def test_another_model_of_the_same_name_is_refused(what, llama, corpus, tmp_path):
    file, out = text_study(tmp_path, corpus), tmp_path / "out"
    run(file, out, only=["llama"])
    before = by_job(out)["llama", 7]
    if what == "weights":
        weights = load_file(llama / "model.safetensors")
        weights["model.norm.weight"] += 1
        save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    elif what == "texts":
        (corpus / "more.txt").write_text("tokens and values " * 90)  # held out or not
    else:
        changed = read_yaml("study", file)
        changed["groups"]["recall"]["arms"]["llama"]["model"]["bos"] = "always"
        file.write_text(yaml.safe_dump(changed))
    key = {"weights": "fingerprint"}.get(what, what)
    message = f"with another {key} of .*; --force makes arm llama"
    with pytest.raises(ValueError, match=message) as error:
        run(file, out, only=["llama"])
    assert "\n" not in str(error.value)
    assert run(file, out, only=["llama"], force=True).ran == 1
    after = by_job(out)["llama", 7]
    assert after["model"][key] != before["model"][key]
    if what == "weights":
        moved = after["scores"]["weights-for-tests"] - before["scores"]["weights-for-tests"]
        assert moved == pytest.approx(16)  # one more in each of 16 channels


def test_results_outlive_the_model(llama, corpus, tmp_path):
    arms = {"llama": {"model": {"name": str(llama), "data": f"files:{corpus}/*.txt"}}}
    file, out = study_file(tmp_path, group={"arms": arms}), tmp_path / "out"
    run(file, out)
    llama.rename(tmp_path / "elsewhere")
    launcher = InProcess()
    assert (run(file, out, launcher).finished, launcher.started) == (1, [])
    again = ["weights-for-tests", "bpb"]
    with pytest.raises(ValueError, match=r"arm llama: .*llama is neither a run nor a model"):
        run(study_file(tmp_path, group={"arms": arms, "evaluations": again}), out)


def test_a_run_and_a_model_do_not_share_a_folder(llama, corpus, tmp_path):
    file, out = study_file(tmp_path), tmp_path / "out"
    run(file, out, only=["fixed"])
    other = study_file(tmp_path, group={"arms": {"fixed": {"model": "llama"}}})
    with pytest.raises(ValueError, match=r"a run that was trained there; --force makes arm fixed"):
        run(other, out)
    assert run(other, out, force=True).finished == 1
    assert by_job(out)["fixed", 7]["scores"]["weights-for-tests"] == pytest.approx(sum_of(llama))
    with pytest.raises(ValueError, match=r"a model that was not trained there; --force makes arm"):
        run(study_file(tmp_path), out, only=["fixed"])


def test_a_run_is_not_its_model_and_the_checkpoint_that_is_one_is_named(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-000004").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"run is a run: .* a checkpoint, \S*step-000004$"):
        place_of(str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("model", "evaluation", "words"),
    [
        ("nowhere", "bpb", "arm a: nowhere is neither a run nor a model"),
        ("llama", "bpb", "bpb does not fit arm a: arm a has no texts"),
        ("llama", "recall", "recall does not fit arm a"),
        ({"name": "llama", "data": "files:none/*.txt"}, "bpb", "arm a: .*none"),
        ({"name": "llama", "bos": "always"}, {"type": "core", "folder": "none"}, "core does not"),
    ],
)
def test_what_cannot_be_evaluated_is_told_first(model, evaluation, words, llama, tmp_path):
    arms = {"a": {"model": model, "evaluations": [evaluation]}}
    file, launcher = study_file(tmp_path, group={"arms": arms}), InProcess()
    with pytest.raises(ValueError, match=words) as error:
        run(file, tmp_path / "out", launcher)
    assert "\n" not in str(error.value)
    assert (launcher.started, (tmp_path / "out").exists()) == ([], False)


@pytest.mark.parametrize(
    ("arm", "group", "words"),
    [
        ({"model": "llama", "config": "quick/recall_fixed"}, {}, "leave config and overrides out"),
        ({"model": "llama", "overrides": ["training.steps=1"]}, {}, "leave config and overrides"),
        ({"model": "llama", "seeds": [1, 2]}, {}, r"has one seed, got \[1, 2\]"),
        ({"model": {"name": "llama", "data": "recall"}}, {}, "data must be texts"),
        ({"model": {"name": "llama", "data": "stdlob"}}, {}, "stdlob"),
        (
            {"model": "llama"},
            {"match": {"by": "params", "to": "b"}},
            "arm 'a' is a model that exis",
        ),
    ],
)
def test_what_a_model_cannot_have(arm, group, words, tmp_path):
    arms = {"a": arm, "b": "quick/recall_fixed"}
    with pytest.raises(ValueError, match=words) as error:
        load_study(study_file(tmp_path, group={"arms": arms, **group}))
    assert "\n" not in str(error.value)


def test_where_a_model_is(llama, tmp_path, monkeypatch):
    arms = {"a": {"model": "llama", "label": "L"}, "b": {"model": "hf:some/name", "seeds": [3]}}
    file = study_file(tmp_path, seeds=[5, 6], group={"arms": arms, "seeds": [6, 5]})
    monkeypatch.chdir(tmp_path.parent)
    a, b = load_study(file).arms.values()
    assert (a.config.name, a.label, a.seeds) == (str(llama), "L", (6,))
    assert (b.config.name, b.label, b.seeds) == ("hf:some/name", "b", (3,))
    file.rename(tmp_path.parent / "moved.yaml")
    moved = tmp_path.parent / "moved.yaml"
    assert load_study(moved).arms["a"].config.name == "llama"  # from the current folder on
    changed = load_study(moved, [f"groups.recall.arms.a.model={tmp_path}/x", "title=Other"])
    assert (changed.arms["a"].config.name, changed.title) == (f"{tmp_path}/x", "Other")
    with pytest.raises(ValueError, match=r"unknown setting in groups\.recall\.arms\.a"):
        load_study(moved, ["groups.recall.arms.a.modle=x"])
    moved.unlink()


def test_a_setting_is_changed_at_the_command_line(llama, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("meanbank.studies.launch.Processes", lambda jobs: InProcess())
    file, out = text_study(tmp_path, corpus), tmp_path / "out"
    arm = "groups.recall.arms.llama"
    command = ["study", "run", str(file), "--out", str(out), "--only", "llama", "--jobs", "1"]
    llama.rename(tmp_path / "other")
    with pytest.raises(SystemExit) as stop:
        main([*command, "--set", f"{arm}.model.name={tmp_path}/other", f"{arm}.seeds=[4]"])
    assert stop.value.code == 0
    assert by_job(out)["llama", 4]["model"]["name"] == f"{tmp_path}/other"
    assert read_study(out).arms["llama"].seeds == (4,)


def existing(arm, items, seed=7):
    scores = {"x": sum(items) / len(items), "bare": 2.0}
    return RunScores(
        arm=arm, seed=seed, existing=True, scores=scores,
        items={"x": {str(number): value for number, value in enumerate(items)}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "each", "verdict", "mean"),
    [
        ("x(a) > 0.3", False, "holds", 0.75),  # of 40 items 30: about .61 to .88
        ("x(a) > 0.95", False, "does not hold", 0.75),
        ("x(a) > 0.7", False, "undecided", 0.75),
        ("x(a) > 0.7", True, "holds", None),
        ("x(a) > 0.8", True, "does not hold", None),
        ("x(a) - x(b) > 0", False, "undecided", 0.0),  # the same items: a point
        ("bare(a) > 1", False, "not testable", 2.0),
        ("bare(a) > 1", True, "holds", None),
        ("y(a) > 1", True, "not measured", None),
    ],
)
def test_claims_about_models_alone_are_judged_over_items(claim, each, verdict, mean):
    items = [1.0] * 30 + [0.0] * 10
    runs = [existing("a", items), existing("b", items, seed=3)]
    (found,) = judge([ClaimSpec(claim=claim, each=each)], runs)
    assert (found.verdict, found.mean, found.p, found.interval) == (verdict, mean, None, None)
    assert verdict == "not measured" or found.seeds == (7,)


def test_a_model_stands_beside_every_seed():
    values = {1: 0.9, 2: 0.8, 3: 1.0}
    trained = [RunScores(arm="t", seed=s, scores={"bare": v}) for s, v in values.items()]
    tuning = RunScores(arm="t", seed=9, tuning=True, scores={"bare": 0.0})
    runs = [*trained, tuning, existing("a", [1.0, 0.0])]
    (found,) = judge([ClaimSpec(claim="bare(a) - bare(t) > 1")], runs)
    assert found.values == pytest.approx({1: 1.1, 2: 1.2, 3: 1.0})
    assert found.tuning_values == {9: 2.0}
    assert found.mean == pytest.approx(1.1)


def test_a_model_is_compared_with_every_seed():
    trained = [
        RunScores(arm="t", seed=s, scores={}, items={"x": {"0": v, "1": 0.0}})
        for s, v in ((1, 1.0), (2, 0.0))
    ]
    runs = [*trained, existing("a", [1.0, 1.0]), existing("b", [0.0, 1.0], seed=5)]
    (found,) = compare_arms(runs, "t", "a")
    assert (found.seeds, found.wins, found.losses) == ((1, 2), 0, 2)
    assert found.difference == pytest.approx((-0.5 - 1.0) / 2)
    (found,) = compare_arms(runs, "a", "t")
    assert (found.seeds, found.difference) == ((1, 2), pytest.approx(0.75))
    (found,) = compare_arms(runs, "a", "b")
    assert (found.items, found.wins, found.ties) == (2, 1, 1)
