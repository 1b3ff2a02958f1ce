"""Trackers: what they are told, offline unless asked, resumed, and never the end of a run."""

import contextlib
import importlib.util
import json
import sqlite3
import sys
import types
import typing

import pytest

from meanbank.training import load_config, start, train
from meanbank.training import trackers as trackers_module
from meanbank.training.config import TrackerName
from meanbank.training.metrics import read_metrics
from meanbank.training.trackers import TRACKERS, Trackers, tracking

CONFIG = {"model": {"hidden_size": 4}}


class Fake:
    """Keeps what it is told."""

    def __init__(self, run, first_step, config):
        self.made, self.lines, self.closed = (run, first_step, config), [], False

    def log(self, step, values):
        self.lines.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    """All trackers are fakes; those that were made, in order."""
    found = []

    def make(*arguments):
        found.append(Fake(*arguments))
        return found[-1]

    for name in TRACKERS:
        monkeypatch.setitem(TRACKERS, name, make)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return found


def test_a_setting_for_each():
    assert set(TRACKERS) == set(typing.get_args(TrackerName))


def test_they_are_told_every_number_and_a_resumed_run_goes_on(config_file, tmp_path, made):
    overrides = ["training.trackers=[wandb, trackio]"]
    run = train(load_config(config_file, [*overrides, "training.steps=6"]), tmp_path / "run")
    lines = read_metrics(run / "metrics.jsonl")
    told = [(line.pop("step"), line) for line in lines]
    assert [fake.lines for fake in made] == [told, told]
    assert all(fake.closed for fake in made)
    assert made[0].made == (run, 0, load_config(config_file, overrides).plain())
    for step in ("step-000006", "step-000004"):
        (run / "checkpoints" / step).rename(tmp_path / step)
    # it is a free setting
    again = load_config(config_file, ["training.trackers=[tensorboard]"])
    train(again, run, resume=True)
    assert made[2].made[1] == 2
    assert [step for step, values in made[2].lines if "loss" in values] == [3, 4, 5, 6]


def test_none_is_the_default(config_file, tmp_path, made):
    train(load_config(config_file, ["training.steps=2"]), tmp_path / "run")
    assert not made


def test_a_missing_package_is_one_line_before_the_data(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(start, "open_data", lambda config: pytest.fail("too late"))
    config = load_config(config_file, ["training.trackers=[trackio]"])
    with pytest.raises(ImportError, match=r"pip install 'meanbank\[trackio\]'") as error:
        train(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[mlflow]", "choose one of"),
        ("[wandb, wandb]", "trackers must be named once, got wandb, wandb"),
        ("wandb", "training.trackers must be a list"),
    ],
)
def test_wrong_settings(config_file, value, message):
    with pytest.raises(ValueError, match=message):
        load_config(config_file, [f"training.trackers={value}"])


@pytest.mark.parametrize("where", ["made", "log", "close"])
def test_one_that_fails_is_left_out_and_warned_of_once(tmp_path, made, monkeypatch, capsys, where):
    def fail(*_):
        raise OSError("no\nspace")

    if where == "made":
        monkeypatch.setitem(TRACKERS, "wandb", fail)
    else:
        broken = type("Broken", (Fake,), {where: fail})
        monkeypatch.setitem(TRACKERS, "wandb", broken)
    with tracking(["wandb", "trackio"], tmp_path, 0, CONFIG) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"loss": 1.0, "text": "x", "flag": True})
    assert made[0].lines == [(step, {"loss": 1.0}) for step in (1, 2, 3)]
    assert made[0].closed
    warning = "warning: tracker wandb fails and is left out: no space; metrics.jsonl has everything"
    assert capsys.readouterr().err == warning + "\n"


def test_they_are_closed_when_a_run_fails(tmp_path, made):
    with contextlib.suppress(ZeroDivisionError), tracking(["wandb"], tmp_path, 0, {}):
        raise ZeroDivisionError
    assert made[0].closed


def test_an_interruption_is_no_failure_of_a_tracker():
    class Interrupted(Fake):
        def log(self, step, values):
            raise KeyboardInterrupt

    trackers = Trackers()
    trackers.add("wandb", lambda: Interrupted(None, 0, {}))
    with pytest.raises(KeyboardInterrupt):
        trackers.log(1, {})


class FakeModule(types.ModuleType):
    """A package with `init`, which keeps its arguments, and a run that keeps what is logged."""

    def __init__(self, name, **more):
        super().__init__(name)
        self.inits, self.logged, self.finished = [], [], 0
        self.__dict__.update(more)

    def Settings(self, **settings):  # as wandb calls it
        return settings

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "kept")
    module = FakeModule("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def track(name, run, first_step=0):
    run.mkdir(exist_ok=True)
    with tracking([name], run, first_step, CONFIG) as trackers:
        trackers.log(first_step + 1, {"loss": 2.0})
        trackers.log(first_step + 1, {"held_out_bpb": 1.0})


def test_wandb_is_offline_and_keeps_its_id(tmp_path, wandb, monkeypatch):
    track("wandb", tmp_path / "mine")
    track("wandb", tmp_path / "mine", 4)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    track("wandb", tmp_path / "mine", 9)
    first, second, third = wandb.inits
    assert [one["mode"] for one in wandb.inits] == ["offline", "offline", "online"]
    assert [one["resume"] for one in wandb.inits] == [None, None, "allow"]
    assert [one["project"] for one in wandb.inits] == ["meanbank", "meanbank", "ours"]
    kept = json.loads((tmp_path / "mine" / "wandb.json").read_text())
    assert first["id"] == second["id"] == third["id"] == kept["id"]
    assert (first["name"], first["dir"], first["config"]) == (
        "mine",
        str(tmp_path / "mine"),
        CONFIG,
    )
    assert wandb.logged[:3] == [
        (1, {"loss": 2.0}),
        (1, {"held_out_bpb": 1.0}),
        (5, {"loss": 2.0}),
    ]
    assert wandb.finished == 3
    track("wandb", tmp_path / "other")
    assert wandb.inits[-1]["id"] != first["id"]


@pytest.fixture
def trackio(monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    module, utils = FakeModule("trackio"), types.ModuleType("trackio.utils")
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setitem(sys.modules, "trackio.utils", utils)
    module.utils = utils
    return module


def test_trackio_is_local_and_goes_on(tmp_path, trackio, capsys):
    trackio.utils.TRACKIO_DIR = tmp_path / "mine" / "trackio"
    track("trackio", tmp_path / "mine")
    track("trackio", tmp_path / "mine", 4)
    for one in trackio.inits:
        assert (one["project"], one["name"], one["resume"]) == ("meanbank", "mine", "allow")
        assert one["config"] == CONFIG
    assert [step for step, _ in trackio.logged] == [1, 1, 5, 5]
    assert trackio.finished == 2
    assert capsys.readouterr().err == ""
    track("trackio", tmp_path / "other")  # the package has settled for the first one's folder
    assert len(trackio.inits) == 2
    assert "set TRACKIO_DIR for several runs in one" in capsys.readouterr().err
    assert "TRACKIO_DIR" not in trackers_module.os.environ


def test_trackio_where_the_environment_says(tmp_path, trackio, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "all"))
    trackio.utils.TRACKIO_DIR = tmp_path / "all"
    track("trackio", tmp_path / "mine")
    track("trackio", tmp_path / "other")
    assert [one["name"] for one in trackio.inits] == ["mine", "other"]


def test_tensorboard_for_real(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'meanbank[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path / "mine")
    track("tensorboard", tmp_path / "mine", 4)
    track("tensorboard", tmp_path / "mine", 2)  # the fifth step is done again
    events = EventAccumulator(str(tmp_path / "mine" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (3, 2.0)]
    (config,) = events.Tensors("config/text_summary")
    assert b"hidden_size: 4" in config.tensor_proto.string_val[0]


@pytest.mark.slow
def test_wandb_for_real(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install 'meanbank[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    track("wandb", tmp_path / "mine")
    (file,) = (tmp_path / "mine" / "wandb").glob("offline-run-*/run-*.wandb")
    kept = json.loads((tmp_path / "mine" / "wandb.json").read_text())
    assert file.stem == f"run-{kept['id']}"
    assert b"held_out_bpb" in file.read_bytes()


@pytest.mark.slow
def test_trackio_for_real(tmp_path, monkeypatch):
    if importlib.util.find_spec("trackio") is None:  # importing it would settle its folder
        pytest.skip("pip install 'meanbank[trackio]'")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    track("trackio", tmp_path / "mine")
    track("trackio", tmp_path / "mine", 4)
    with sqlite3.connect(tmp_path / "mine" / "trackio" / "meanbank.db") as database:
        rows = database.execute("select run_name, step from metrics order by step").fetchall()
        configs = database.execute("select run_name from configs").fetchall()
    assert rows == [("mine", 1), ("mine", 1), ("mine", 5), ("mine", 5)]
    assert configs == [("mine",)]
