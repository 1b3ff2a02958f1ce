"""The demo end to end, with two tiny arms in place of its eleven."""

import pytest

from meanbank.studies import demo as module
from meanbank.studies.demo import Arm, demo_arms, run_demo


@pytest.fixture
def tiny_arms(config_file, monkeypatch):
    def arms(out):
        return [
            Arm(
                config_name=str(config_file),
                folder=out / "language" / "kvm_sqrt_bank",
                tasks=("bpb", "position-loss", "memory"),
            ),
            Arm(
                config_name="quick/recall_full",
                overrides=("training.steps=2", "training.warmup_steps=0", "training.seed=1"),
                folder=out / "recall" / "full-seed1",
                tasks=("recall",),
            ),
        ]

    monkeypatch.setattr(module, "demo_arms", arms)
    return arms


def trainings(out) -> int:
    return sum(log.read_text().count("run: ") for log in out.rglob("*.log"))


def test_the_demo_runs_goes_on_and_starts_afresh(tiny_arms, tmp_path, capsys):
    out = tmp_path / "demo"
    report = run_demo(out, jobs=2)
    shown = capsys.readouterr().out
    assert f"report: {report}" in " ".join(shown.split())
    assert "kvm_sqrt_bank: generated text" in shown
    assert "Expectations" in shown
    assert report.read_text().startswith("<!DOCTYPE html>")
    for name in ("bigram.json", "samples.json", "figures/memory.png"):
        assert (out / name).is_file(), name
    assert trainings(out) == 2
    run_demo(out, jobs=1)
    assert trainings(out) == 2, "a finished run was trained again"


def test_a_failing_run_is_told_in_one_line(tiny_arms, tmp_path, monkeypatch):
    arm = tiny_arms(tmp_path / "demo")[1]
    arm.folder.mkdir(parents=True)
    (arm.folder / "notes.txt").write_text("in the way")
    with pytest.raises(ValueError, match="full-seed1 ended with code 2: meanbank: error:") as error:
        module.Children().finish(arm)
    assert "exists already" in str(error.value)
    assert "\n" not in str(error.value)


def test_runs_of_other_settings_are_not_mixed(tiny_arms, tmp_path):
    out = tmp_path / "demo"
    (out / "recall" / "full-seed1").mkdir(parents=True)
    (out / "demo.json").write_text("{}")
    (out / "recall" / "full-seed1" / "config.yaml").write_text(
        "model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1}"
    )
    with pytest.raises(ValueError, match="--force starts the demo afresh"):
        run_demo(out)
    assert (out / "recall" / "full-seed1" / "config.yaml").is_file()


def test_the_real_arms_are_those_of_the_report(tmp_path):
    arms = demo_arms(tmp_path)
    names = {str(arm.folder.relative_to(tmp_path)) for arm in arms}
    assert len(names) == len(arms) == 11
    language = {arm.folder.name for arm in arms if arm.is_language}
    assert language == {"full", "block_window", "kvm_fixed", "kvm_sqrt", "kvm_sqrt_bank"}
