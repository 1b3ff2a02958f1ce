"""Training on several ranks: what one process gives, whatever is shared how and who fails."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meanbank.data import Batch
from meanbank.data.ahead import Share
from meanbank.model.block import Block
from meanbank.training import load_config, train
from meanbank.training.metrics import read_metrics
from meanbank.training.ranks import Ranks
from meanbank.training.start import check_ranks

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 6, 3
BASE = [
    f"training.steps={STEPS}",
    f"training.checkpoint_every={EVERY}",
    "training.keep_last=9",
    "training.evaluate_every=4",
    "data.batch_size=7",  # which no number of ranks divides, nor the rows of tables:
    "data.vocab_size=271",
    "data.sequence_length=24",
]
RECIPES = {
    "plain": ["training.recipe=plain"],
    "kvm": ["training.recipe=kvm"],
    "bov": ["training.recipe=bov"],
    "sparse": ["training.recipe={type: bov, table_gradients: sparse, clip: 1.0}"],
}
FSDP, SHARDED = "training.parallel=fsdp", "training.tables=sharded"


def accumulated(parts):
    return f"training.accumulation={parts}"


def run_of(name, recipe, *sets, **more):
    return {"run": name, "set": [*BASE, *RECIPES[recipe], *sets], "double": True, **more}


def run_trials(folder, plans):
    """Results by name; one process that forks, for the workers of pytest have threads."""
    (folder / "trials.json").write_text(json.dumps(plans))
    command = [sys.executable, str(Path(__file__).with_name("rank_trials.py"))]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    places = {"MEANBANK_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(folder), str(folder / "trials.json")],
        env={**os.environ, **settings, **places},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def plan(name, ranks, *runs, **more):
    return {"name": name, "ranks": ranks, "runs": list(runs), **more}


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


def assert_same_run(folder, trials, name, reference, tolerance=1e-9):
    """The same figures in every line, and the same tensors in every checkpoint."""
    lines, other = (
        next(t["seen"][run]["figures"] for t in reversed(trials) if run in t["seen"])
        for run in (name, reference)
    )
    assert len(lines) == len(other) > STEPS
    for line, expected in zip(lines, other, strict=True):
        assert line == pytest.approx(expected, rel=tolerance), (name, line, expected)
    last = (f"checkpoints/step-{lines[-1]['step']:06d}/{kind}.safetensors" for kind in FILES)
    for file in last:
        found, expected = load_file(folder / name / file), load_file(folder / reference / file)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            if "rng" not in key:
                torch.testing.assert_close(tensor, expected[key], rtol=tolerance, atol=tolerance)


FILES = ("model", "optimizer")


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


WAYS = {
    f"{parallel}-{tables}-{parts}": [
        f"training.parallel={parallel}",
        f"training.tables={tables}",
        accumulated(parts),
    ]
    for parallel in ("ddp", "fsdp")
    for tables in ("replicated", "sharded")
    for parts in (1, 3)
}
LONG, SHORT = ["training.steps=50", "training.checkpoint_every=50"], ["training.steps=10"]
NANOCHAT = ["model.backbone=nanochat", "model.plan.1.values={{type: gated_additive}"]
MODELS = {
    "shared table": [f"model.plan.{at}.values={{type: bank, table: shared}}" for at in (0, 1)],
    "nanochat": NANOCHAT,
    "rwkv7": ["model.plan.0.memory={type: rwkv7}"],
    "mixed": ["model.plan.1.values={type: mixed, other: {type: bank}}"],
    "first layer": ["model.plan.1.values={type: first_layer}"],
    "isolate": ["data.pack=isolate"],
    "a memory without use": ["data.sequence_length=6"],
    # A row or two a rank: where a document ends in them, that rank alone has no use for the memory.
    "a memory some use": [
        "data.pack=isolate",
        "data.sequence_length=12",
        "data.batch_size=3",
        "training.steps=40",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_way_gives_the_same_run(tmp_path, recipe):
    """Over 50 steps in float64, and the first 10 in float32."""
    single = {"double": False}
    found = run_trials(
        tmp_path,
        [
            plan(
                "one", 1, run_of("long", recipe, *LONG), run_of("short", recipe, *SHORT, **single)
            ),
            plan("two", 2, *(run_of(f"long-{n}", recipe, *LONG, *w) for n, w in WAYS.items())),
            plan(
                "single",
                2,
                *(run_of(f"short-{n}", recipe, *SHORT, *w, **single) for n, w in WAYS.items()),
            ),
        ],
    )
    for name in WAYS:
        assert_same_run(tmp_path, found, f"long-{name}", "long")
        losses, expected = (
            [line["loss"] for t in found for line in t["seen"].get(n, NOTHING)["figures"][:10]]
            for n in (f"short-{name}", "short")
        )
        assert losses == pytest.approx(expected, rel=1e-5), name


NOTHING = {"figures": []}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_model(tmp_path, ranks):
    """Also with three ranks, which have neither as many rows of a batch nor of a table."""
    ways = {"ddp": [SHARDED], "fsdp": [FSDP, SHARDED, "training.checkpointing=blocks"]}
    found = run_trials(
        tmp_path,
        [
            plan("one", 1, *(run_of(name, "bov", *sets) for name, sets in MODELS.items())),
            plan(
                "more",
                ranks,
                *(
                    run_of(f"{name}-{way}", "bov", *sets, *more)
                    for name, sets in MODELS.items()
                    for way, more in ways.items()
                ),
            ),
        ],
    )
    assert found[1]["codes"] == [0] * ranks, found[1]["said"]
    for name in MODELS:
        for way in ways:
            assert_same_run(tmp_path, found, f"{name}-{way}", name)


@pytest.mark.slow
def test_bfloat16_means_the_same_everywhere(tmp_path):
    half = ["training.precision=bfloat16"]
    found = run_trials(
        tmp_path,
        [
            plan("one", 1, run_of("one", "plain", *half, double=False)),
            plan(
                "two",
                2,
                run_of("ddp", "plain", *half, double=False),
                run_of("fsdp", "plain", *half, FSDP, SHARDED, double=False),
            ),
        ],
    )
    expected = [line["loss"] for line in found[0]["seen"]["one"]["figures"] if "loss" in line]
    for name in ("ddp", "fsdp"):
        lines = found[1]["seen"][name]["figures"]
        losses = [line["loss"] for line in lines if "loss" in line]
        assert losses == pytest.approx(expected, rel=2e-3)
        last = tmp_path / name / f"checkpoints/step-{STEPS:06d}" / "model.safetensors"
        assert {tensor.dtype for tensor in load_file(last).values()} == {torch.float32}


def moments(count):
    draw = random.Random(0)
    ways = [[], [FSDP, SHARDED]]
    for number in range(count):
        run = run_of(f"moment-{number}", "plain", *ways[number % 2])
        kill = {"moment": 2.5 * draw.random(), "rank": draw.randrange(2), "signal": "SIGKILL"}
        yield plan(f"moment-{number}", 2, run, **kill)
        yield plan("again", 2, run, kind="again")


@pytest.mark.slow
def test_no_kill_costs_more_than_a_checkpoint(tmp_path):
    """At any moment of either rank, and at every call of the second save that writes."""
    whole = run_of("whole", "plain")
    counted = {**whole, "from": 2 * EVERY - 1}
    found = run_trials(
        tmp_path,
        [
            plan("whole", 2, whole),
            *moments(20),
            plan("counted", 2, {**counted, "run": "counted"}),
            plan("save", 2, {**counted, "run": "save"}, every_call=True),
        ],
    )
    expected = found[0]["seen"]["whole"]["figures"]
    hit = 0
    for result in found:
        (seen,) = result["seen"].values()
        assert not seen["broken"], result
        if result.get("kind") == "again":
            assert result["codes"] == [0, 0], result
            assert "damaged" not in "".join(result["said"]), result
            assert not seen["left"], result
            for line, other in zip(seen["figures"], expected, strict=True):
                assert line == pytest.approx(other, rel=1e-9), result
        elif -signal.SIGKILL in result["codes"]:
            hit += 1
            assert seen["lost"] <= EVERY, result
            assert result["seconds"] < 30, result
            assert 0 not in result["codes"] or seen["status"][0] == "done", result
        else:
            assert result["codes"] == [0, 0], result
    assert hit > 20


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

    batch_size = 11

    def batch(self, step):
        return self.rows(step, 0, self.batch_size)

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
