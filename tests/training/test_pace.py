"""Utilisation and where a step's time goes."""

import json
import time

import pytest
import torch

from meanbank.benchmarks import Machine, ceilings
from meanbank.model.accounting import flops_by_part
from meanbank.training import load_config, train
from meanbank.training import trainer as trainer_module
from meanbank.training.metrics import read_metrics
from meanbank.training.pace import Pace, measured_ceiling
from tests.conformance.models import make_model


def small_model():
    return make_model("kvm_power_law", "bank", "grouped", torch.float32)


def test_figures_of_known_times(monkeypatch):
    model, clock = small_model(), iter([10.0, 10.5, 20.0, 20.25])
    pace = Pace(model, ceiling=1e6)
    parts = {"data_seconds": 1.0, "forward_seconds": 2.0}
    ids = torch.zeros(3, 16, dtype=torch.long)
    flops = 3 * sum(part.total for part in flops_by_part(model, 16).values())
    figures = pace.figures(ids, 4.0, parts)
    assert figures == {"logging_seconds": 1.0, "utilization": pytest.approx(flops / 4.0 / 1e6)}
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: next(clock))
        for _ in range(2):
            with pace.logging():
                pass
    assert pace.figures(ids, 4.0, parts)["logging_seconds"] == 1.0 + 0.75
    assert pace.figures(ids, 3.0, parts)["logging_seconds"] == 0.0
    longer = torch.zeros(1, 32, dtype=torch.long)
    flops = sum(part.total for part in flops_by_part(model, 32).values())
    assert pace.figures(longer, 1.0, {})["utilization"] == pytest.approx(flops / 1e6)
    assert pace.figures(ids, 1.0, {})["utilization"] > 0


def test_without_a_ceiling_there_is_no_utilisation():
    figures = Pace(small_model()).figures(torch.zeros(1, 4, dtype=torch.long), 1.0, {})
    assert list(figures) == ["logging_seconds"]


def test_a_run_tells_it_and_learns_the_same(config_file, tmp_path, monkeypatch):
    probes = ceilings.probes
    small = {"side": 16, "nbytes": 4}
    monkeypatch.setattr(
        ceilings, "probes", lambda machine, dtype, **_: probes(machine, dtype, **small)
    )
    plain = train(load_config(config_file), tmp_path / "plain")
    told = train(load_config(config_file, ["training.utilization=true"]), tmp_path / "told")
    assert json.loads((plain / "run.json").read_text())["ceiling_flops_per_second"] is None
    ceiling = json.loads((told / "run.json").read_text())["ceiling_flops_per_second"]
    assert ceiling > 0
    steps, others = (
        [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
        for run in (told, plain)
    )
    assert [line["loss"] for line in steps] == [line["loss"] for line in others]
    assert all("utilization" not in line for line in others)
    for line in steps:
        parts = [value for name, value in line.items() if name.endswith("_seconds")]
        assert len(parts) == 5
        # what came before the step is told with it
        assert sum(parts) >= 0.999 * 64 / line["tokens_per_second"]
    flops = [line["utilization"] * ceiling / line["tokens_per_second"] for line in steps]
    assert flops == pytest.approx([flops[0]] * 6)


def test_measuring_draws_no_random_numbers(monkeypatch):
    probes, asked = ceilings.probes, []

    def small(machine, dtype, **_):
        asked.append((machine, dtype))
        return probes(machine, dtype, side=16, nbytes=4)

    monkeypatch.setattr(ceilings, "probes", small)
    torch.manual_seed(7)
    expected = torch.rand(3)
    model = small_model()
    torch.manual_seed(7)
    assert measured_ceiling(model, torch.bfloat16) > 0
    assert torch.equal(torch.rand(3), expected)
    threads = torch.get_num_threads()
    assert asked == [(Machine(device="cpu", threads=threads), torch.bfloat16)]


def test_a_resumed_run_measures_again(config_file, tmp_path, monkeypatch):
    rates = iter([1e9, 2e9])
    monkeypatch.setattr(trainer_module, "measured_ceiling", lambda model, dtype: next(rates))
    overrides = ["training.utilization=true"]
    run = train(load_config(config_file, overrides), tmp_path / "run")
    (run / "checkpoints" / "step-000006").rename(tmp_path / "aside")
    train(load_config(config_file, overrides), run, resume=True)
    assert json.loads((run / "run.json").read_text())["ceiling_flops_per_second"] == 2e9
