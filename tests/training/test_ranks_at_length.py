"""Training on several ranks in every way, with every kind of model, killed at any moment."""

import random
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.training.rank_runs import (
    EVERY,
    FSDP,
    RECIPES,
    SHARDED,
    STEPS,
    accumulated,
    assert_same_run,
    plan,
    run_of,
    run_trials,
)

pytestmark = pytest.mark.slow

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
# In float32. Muon's products are in bfloat16, where another last bit may round to another number.
ROUNDING = {"plain": 1e-5, "kvm": 1e-5, "bov": 1e-4, "sparse": 1e-4}
LONG, SHORT = ["training.steps=50", "training.checkpoint_every=50"], ["training.steps=10"]
NANOCHAT = ["model.backbone=nanochat", "model.plan.1.values={type: gated_additive}"]
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
        losses, expected = (losses_of(found, each)[:10] for each in (f"short-{name}", "short"))
        assert losses == pytest.approx(expected, rel=ROUNDING[recipe]), name


def losses_of(found, name):
    (lines,) = [result["seen"][name]["figures"] for result in found if name in result["seen"]]
    return [line["loss"] for line in lines if "loss" in line]


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
    for name in ("ddp", "fsdp"):
        assert losses_of(found, name) == pytest.approx(losses_of(found, "one"), rel=2e-3)
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


def test_no_kill_costs_more_than_a_checkpoint(tmp_path):
    """At any moment of either rank, and at every call of the second save that writes."""
    whole = run_of("whole", "plain")
    counted = {**whole, "from": 2 * EVERY - 1}
    found = run_trials(
        tmp_path,
        [
            plan("whole", 2, whole),
            *moments(100),
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
    assert hit > 60
