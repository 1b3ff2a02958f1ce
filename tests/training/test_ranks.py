"""Training on several ranks: what one process gives, whatever is shared how and who fails."""

import re
import signal

import pytest
import torch

from meanbank.data import Batch
from meanbank.data.ahead import Share
from meanbank.model.block import Block
from meanbank.training import load_config, train
from meanbank.training.metrics import read_metrics
from meanbank.training.ranks import Ranks
from meanbank.training.start import check_ranks
from tests.training.rank_runs import (
    EVERY,
    FSDP,
    SHARDED,
    accumulated,
    assert_same_run,
    plan,
    run_of,
    run_trials,
)

STOP = {"step": 1, "what": "SIGTERM"}
PLANS = [
    plan("one", 1, *(run_of(name, name) for name in ("plain", "bov", "sparse"))),
    plan(
        "two",
        2,
        run_of("plain-ddp", "plain", accumulated(3)),
        run_of("sparse-ddp", "sparse"),
        run_of("sparse-ddp-sharded", "sparse", SHARDED, accumulated(2)),
        run_of("bov-fsdp-sharded", "bov", FSDP, SHARDED, "training.checkpointing=blocks"),
        run_of("sparse-fsdp", "sparse", FSDP, accumulated(3)),
    ),
    plan("stopped", 1, run_of("sparse-moved", "sparse", fault={**STOP, "rank": 0})),
    plan("moved", 2, run_of("sparse-moved", "sparse", fault={**STOP, "step": 3, "rank": 1})),
    plan("moved again", 2, run_of("sparse-moved", "sparse", FSDP, SHARDED)),
    plan(
        "nan",
        2,
        run_of(
            "nan",
            "plain",
            fault={"step": 4, "rank": 1, "what": "nan", "weight": "model.layers.1.mlp.up.weight"},
        ),
    ),
    plan("killed", 2, run_of("killed", "plain", fault={"step": 4, "rank": 1, "what": "SIGKILL"})),
    plan("again", 2, run_of("killed", "plain", FSDP)),
    plan("many", 2, run_of("many", "plain", accumulated(4))),
    plan("there", 2, run_of("plain", "plain", anew=True)),
    plan("full", 2, run_of("full", "plain", at=1, what="ENOSPC", **{"from": 2 * EVERY - 1})),
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, {result["name"]: result for result in run_trials(folder, PLANS)}


def test_two_ranks_give_what_one_gives(trials):
    folder, results = trials
    assert results["one"]["codes"] == [0], results["one"]["said"]
    assert results["two"]["codes"] == [0, 0], results["two"]["said"]
    for run in PLANS[1]["runs"]:
        reference = run["run"].split("-")[0]
        assert_same_run(folder, list(results.values()), run["run"], reference)


def test_one_rank_speaks(trials):
    _, results = trials
    assert results["two"]["said"][1] == ""
    said = results["two"]["said"][0].splitlines()
    assert len([line for line in said if line.startswith("run: ")]) == len(PLANS[1]["runs"])


def test_a_run_goes_on_with_other_ranks(trials):
    """One rank, then two with `ddp`, then two with `fsdp`, after signals to any of them.

    The second one leaves an evaluation, with which the third begins.
    """
    folder, results = trials
    assert results["stopped"]["codes"] == [143], results["stopped"]["said"]
    assert results["moved"]["codes"] == [143, 143], results["moved"]["said"]
    assert "stopped by SIGTERM after step 4" in results["moved"]["said"][0]
    assert results["moved"]["seen"]["sparse-moved"]["steps"][-1] == 4
    assert results["moved again"]["codes"] == [0, 0], results["moved again"]["said"]
    assert_same_run(folder, list(results.values()), "sparse-moved", "sparse")


def test_a_nan_of_one_rank_stops_all_before_the_update(trials):
    _, results = trials
    found = results["nan"]
    told = "the loss is nan at step 5 on rank 1, first in model.layers.1.mlp.up"
    assert found["codes"] == [2, 2]
    assert found["said"] == [f"meanbank: error: {told}\n", ""]
    assert found["seen"]["nan"]["status"] == ["failed", told]
    assert found["seen"]["nan"]["steps"] == [3]
    assert found["seen"]["nan"]["done"] == 4


def test_a_rank_that_dies_ends_the_others_and_is_named(trials):
    folder, results = trials
    found = results["killed"]
    assert found["codes"] == [2, -signal.SIGKILL]
    (line,) = found["said"][0].splitlines()
    assert re.match("meanbank: error: rank 1 of 2 died or does not answer; go on from", line)
    assert found["seen"]["killed"]["steps"] == [3]
    assert not found["seen"]["killed"]["broken"]
    assert results["again"]["codes"] == [0, 0], results["again"]["said"]
    assert not results["again"]["seen"]["killed"]["left"]
    assert_same_run(folder, list(results.values()), "killed", "plain")


def test_errors_are_one_line_of_rank_0(trials):
    _, results = trials
    told_by = {
        "many": "need at least 8 rows a batch",
        "there": "exists already",
        "full": "No space left on device; the checkpoint of step 3 is there",
    }
    for name, told in told_by.items():
        assert results[name]["codes"] == [2, 2]
        (line,) = [line for line in results[name]["said"][0].splitlines() if "error" in line]
        assert told in line
        assert results[name]["said"][1] == ""
    assert results["many"]["seen"]["many"]["status"] is None  # no folder


def test_a_model_that_does_not_compile_is_told_before_the_first_step(
    config_file, tmp_path, monkeypatch
):
    def fails(*_):
        raise RuntimeError("no compiler\nfound")

    compile_block = Block.compile
    assert compile_block is torch.nn.Module.compile
    monkeypatch.setattr(Block, "compile", lambda block: block.register_forward_pre_hook(fails))
    config = load_config(config_file, ["training.compile=true"])
    with pytest.raises(ValueError, match=r"does not compile here \(no compiler found\): set train"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_compiled_blocks_give_the_same(config_file, tmp_path, monkeypatch):
    """With a compiler that takes no time; the first pass is over before step 1."""
    compiled = []

    def compile_block(block):
        compiled.append(block)
        block._compiled_call_impl = block._call_impl

    monkeypatch.setattr(Block, "compile", compile_block)
    losses = []
    for sets in ([], ["training.compile=true"]):
        config = load_config(config_file, ["training.steps=2", "training.warmup_steps=1", *sets])
        run = train(config, tmp_path / f"run-{len(sets)}")
        losses.append([line.get("loss") for line in read_metrics(run / "metrics.jsonl")])
    assert losses[0] == losses[1]
    assert len(compiled) == 2


class Rows:
    """Batches whose rows say which they are."""

    def rows_at(self, step):
        return 11

    def batch(self, step):
        return self.rows(step, 0, self.rows_at(step))

    def rows(self, step, first, count):
        ids = torch.arange(first, first + count)[:, None] + 100 * step
        return Batch(input_ids=ids, labels=ids)


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
def test_ranks_divide_the_rows_as_parts_do(ranks):
    parts = Rows().batch(3).parts(ranks)
    for rank, part in enumerate(parts):
        assert torch.equal(Share(Rows(), rank, ranks).batch(3).input_ids, part.input_ids)


def test_every_part_of_every_rank_has_a_row(config_file):
    config = load_config(config_file, ["data.batch_size=6", "training.accumulation=2"])
    check_ranks(config, Ranks(0, 3))
    with pytest.raises(ValueError, match=r"4 ranks with .* = 2 need at least 8 rows"):
        check_ranks(config, Ranks(0, 4))


def test_a_batch_in_tokens(config_file):
    config = load_config(config_file, ["data.batch_tokens=96", "data.batch_size=8"])
    assert config.data.batch_size == 3  # of 32 tokens
    for wrong, told in (
        (["data.batch_tokens=100"], r"multiple of sequence_length \(32\), got 100"),
        (["data.batch_tokens=96", "data.batch_size=4"], "makes 3 rows of 32 tokens"),
        (["data.batch_tokens=64", "data.source=recall"], "not for the source 'recall'"),
    ):
        with pytest.raises(ValueError, match=told):
            load_config(config_file, wrong)
