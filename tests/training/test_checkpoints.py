"""Checkpoint folders: their manifest, what is kept, damage, and what earlier versions left."""

import hashlib
import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from meanbank.core.files import discard, remove_asides, told, whole_file
from meanbank.model import MeanbankForCausalLM
from meanbank.training import CheckpointError, load_config, load_run, train
from meanbank.training import trainer as trainer_module
from meanbank.training import writer as writer_module
from meanbank.training.checkpoint import checkpoints, damage, snapshot, step_of
from meanbank.training.metrics import Metrics, read_metrics
from meanbank.training.recipes import PlainRecipe
from meanbank.training.run import config_hash
from meanbank.training.writer import CheckpointWriter


def steps_of(run):
    return [step_of(path) for path in checkpoints(run)]


@pytest.fixture
def model():
    from meanbank import MeanbankConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MeanbankForCausalLM(MeanbankConfig(vocab_size=20, plan=[{"memory": "full"}], **sizes))


def taken(model, step=1):
    return snapshot(model, PlainRecipe().optimizer(model, 9), None, step=step, tokens=step)


def test_the_manifest_tells_every_file_and_what_it_is_of(config_file, tmp_path):
    config = load_config(config_file)
    run = train(config, tmp_path / "run")
    for path in checkpoints(run):
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest.pop("files")
        assert files.keys() == {p.name for p in path.iterdir()} - {"manifest.json"}
        for name, expected in files.items():
            content = (path / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            assert expected == {"size": len(content), "sha256": digest}
        step = step_of(path)
        assert manifest == {
            "format": 1,
            "step": step,
            "tokens": 64 * step,
            "version": "0.1.0",
            "config": config_hash(config),
            "data": json.loads((run / "run.json").read_text())["data"]["fingerprint"],
        }
    other = load_config(config_file, ["training.keep_last=3", "data.workers=1"])
    assert config_hash(other) == config_hash(config)
    assert config_hash(load_config(config_file, ["training.seed=1"])) != config_hash(config)


def test_the_folder_is_what_save_pretrained_writes(config_file, tmp_path):
    shared = "model.plan.1.values={type: bank, table: shared}"
    path = checkpoints(train(load_config(config_file, [shared]), tmp_path / "run"))[-1]
    MeanbankForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "saved")
    theirs = {p.name: p for p in (tmp_path / "saved").iterdir()}
    assert theirs.keys() == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((path / "config.json").read_text()) == json.loads(
        theirs["config.json"].read_text()
    )
    ours, saved = load_file(path / "model.safetensors"), load_file(theirs["model.safetensors"])
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


def test_what_is_kept(config_file, tmp_path):
    settings = ["training.steps=11", "training.checkpoint_every=2", "training.evaluate_every=0"]
    keep = ["training.keep_last=2", "training.keep_every=3"]
    run = train(load_config(config_file, [*settings, *keep]), tmp_path / "run")
    assert steps_of(run) == [3, 6, 9, 10, 11]
    run = train(load_config(config_file, [*settings, "training.keep_last=1"]), tmp_path / "one")
    assert steps_of(run) == [11]


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "bit": lambda path: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [("model.safetensors", "bit"), ("optimizer.safetensors", "cut"), ("trainer.json", "gone")],
)
def test_the_one_before_a_damaged_one_is_taken(config_file, tmp_path, capsys, name, how):
    settings = ["training.evaluate_every=0", "training.keep_last=2", "training.steps=5"]
    config = load_config(config_file, settings)
    run = train(config, tmp_path / "run")
    assert steps_of(run) == [4, 5]
    whole = checkpoints(run)[-1] / "manifest.json"
    expected = whole.read_bytes()
    DAMAGES[how](checkpoints(run)[-1] / name)
    assert name in damage(checkpoints(run)[-1])
    capsys.readouterr()
    train(config, run, resume=True)
    told = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(told) == 1
    assert told[0].startswith(f"warning: the checkpoint {checkpoints(run)[-1]} is damaged: {name}")
    assert steps_of(run) == [4, 5]
    assert whole.read_bytes() == expected
    assert damage(checkpoints(run)[-1]) is None


def test_damaged_ones_of_later_steps_do_not_push_out_good_ones(config_file, tmp_path):
    run = train(load_config(config_file, ["training.keep_last=9"]), tmp_path / "run")
    assert steps_of(run) == [2, 4, 6]
    for path in checkpoints(run)[1:]:
        (path / "trainer.json").unlink()
    more = ["training.keep_last=1", "training.checkpoint_every=1"]
    train(load_config(config_file, more), run, resume=True)
    assert steps_of(run) == [6]
    assert damage(checkpoints(run)[-1]) is None


def test_without_any_that_is_whole_nothing_begins_anew(config_file, tmp_path):
    config = load_config(config_file)
    run = train(config, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text()
    for path in checkpoints(run):
        (path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-000006 is damaged: .*manifest\.json is not valid"):
        train(config, run, resume=True)
    assert (run / "metrics.jsonl").read_text() == lines
    assert steps_of(run) == [2, 4, 6]


def test_checkpoints_of_earlier_versions_are_resumed(config_file, tmp_path):
    """They have no manifest, and their runs neither lock nor status nor newer settings."""
    config = load_config(config_file)
    run = train(config, tmp_path / "run")
    expected = (checkpoints(run)[-1] / "model.safetensors").read_bytes()
    shutil.rmtree(checkpoints(run)[-1])
    for path in checkpoints(run):
        (path / "manifest.json").unlink()
    for name in ("lock", "status.json"):
        (run / name).unlink()
    newer = ("keep_every:", "write_behind:", "accumulation:", "workers:")
    lines = (run / "config.yaml").read_text().splitlines(keepends=True)
    old = [line for line in lines if not line.strip().startswith(newer)]
    assert len(old) == len(lines) - 4
    (run / "config.yaml").write_text("".join(old))
    assert load_run(run).step == 4
    train(config, run, resume=True)
    assert (checkpoints(run)[-1] / "model.safetensors").read_bytes() == expected


def test_a_snapshot_is_a_copy(model):
    found = taken(model)
    before = {name: t.clone() for name, t in found.tensors["model.safetensors"].items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for name, tensor in found.tensors["model.safetensors"].items():
        assert torch.equal(tensor, before[name])


def test_one_write_at_a_time_and_errors_come_next(model, tmp_path, monkeypatch):
    going, events = threading.Event(), []

    def save(run, found, **kept):
        events.append(("begin", found.step))
        going.wait()
        events.append(("end", found.step))
        if found.step == 2:
            raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(writer_module, "save_checkpoint", save)
    with (
        pytest.raises(CheckpointError) as error,
        CheckpointWriter(tmp_path, keep_last=1, keep_every=0) as writer,
    ):
        writer.save(taken(model, 1))
        writer.check()  # does not wait
        assert ("end", 1) not in events
        going.set()
        writer.save(taken(model, 2))
        assert events[:2] == [("begin", 1), ("end", 1)]
        writer.save(taken(model, 3))
    assert str(error.value) == (
        f"cannot save step 2 of {tmp_path}: No space left on device; there is none before it"
    )
    assert ("begin", 3) not in events


def test_a_write_that_fails_stops_training_soon(config_file, tmp_path, monkeypatch):
    def fail(run, found, **kept):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer_module, "save_checkpoint", fail)
    with pytest.raises(CheckpointError, match=r"cannot save step 2 .*: Input/output error"):
        train(load_config(config_file, ["training.evaluate_every=0"]), tmp_path / "run")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_training_waits_for_a_write_that_takes_long(config_file, tmp_path, monkeypatch, behind):
    going, steps = threading.Event(), []
    save = writer_module.save_checkpoint
    train_step = trainer_module.Trainer._train_step

    def slow(run, found, **kept):
        going.wait()
        return save(run, found, **kept)

    def counted(self, batches):
        figures = train_step(self, batches)
        steps.append(self.step)
        return figures

    def wait(self):
        if not going.is_set() and self._thread is not None:
            lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
            steps.append(("waits", lines[-1]["step"]))
            going.set()
        return wait_for(self)

    wait_for = CheckpointWriter.wait
    monkeypatch.setattr(writer_module, "save_checkpoint", slow)
    monkeypatch.setattr(CheckpointWriter, "wait", wait)
    monkeypatch.setattr(trainer_module.Trainer, "_train_step", counted)
    settings = ["training.evaluate_every=0", "training.checkpoint_every=3"]
    train(
        load_config(config_file, [*settings, f"training.write_behind={behind}"]), tmp_path / "run"
    )
    assert steps[: 3 + behind + 1] == [*range(1, 4 + behind), ("waits", 2 + behind)]


def test_bytes_that_the_disk_changes_are_noticed(model, tmp_path, monkeypatch):
    from meanbank.training import checkpoint as checkpoint_module

    writer_module.save_checkpoint(tmp_path, taken(model, 1), keep_last=1)
    read = checkpoint_module._read_file
    monkeypatch.setattr(
        checkpoint_module, "_read_file", lambda path: {**read(path), "sha256": "0" * 64}
    )
    with pytest.raises(ValueError, match=r"the disk did not keep .*: config\.json is not what"):
        writer_module.save_checkpoint(tmp_path, taken(model, 2), keep_last=1)
    assert steps_of(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_files_of_processes_that_died_are_removed(config_file, tmp_path):
    config = load_config(config_file, ["training.steps=2"])
    run = tmp_path / "run"
    run.mkdir()
    (run / ".config.yaml.77.tmp").write_text("a")  # nothing else: not yet a run
    train(config, run)
    (run / "checkpoints" / ".step-000009.77.tmp").mkdir()
    (run / "checkpoints" / ".step-000009.77.tmp" / "model.safetensors").write_text("half")
    (run / ".status.json.77.tmp").write_text("a")
    train(config, run, resume=True)
    assert not list(run.rglob("*.tmp"))


def test_discarding_and_leftovers(tmp_path):
    folder = tmp_path / "step-1"
    (folder / "deep").mkdir(parents=True)
    discard(folder)
    (tmp_path / "file").write_text("x")
    discard(tmp_path / "file")
    assert not list(tmp_path.iterdir())
    (tmp_path / ".a.1.tmp").symlink_to(tmp_path)
    (tmp_path / "kept.tmp").write_text("x")
    remove_asides(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.tmp"]


def test_errors_of_the_disk_tell_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as error, whole_file(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    assert error.value.filename == str(tmp_path / "x")
    with pytest.raises(FileNotFoundError) as missing, told(tmp_path):
        (tmp_path / "missing").read_text()
    assert missing.value.filename == str(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_torn_lines_are_repaired_and_none_is_doubled(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        for step in range(1, 5):
            metrics.write(step, loss=float(step))
            if step == 2:
                metrics.write(step, held_out_bpb=1.5)
    with path.open("ab") as file:
        file.write(b'{"step": 5, "lo\xff')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3, 4]
    with Metrics(path, 2) as metrics:
        assert metrics.kept_at(2, "held_out_bpb")
        assert not metrics.kept_at(1, "held_out_bpb")
        metrics.write(3, loss=30.0)
        metrics.sync()
    assert [line.get("loss") for line in read_metrics(path)] == [1.0, 2.0, None, 30.0]
    assert path.read_bytes().endswith(b"30.0}\n")
