"""Study files: what they mean, what is refused, and budgets that are hit."""

import dataclasses

import pytest
import torch

from meanbank.cli import main
from meanbank.core.bundled import read_yaml
from meanbank.memory import KVM, BlockWindow
from meanbank.memory.budgets import PowerLaw
from meanbank.model import MeanbankForCausalLM
from meanbank.model.accounting import flops_by_part
from meanbank.studies.resolve import load_study, read_study, write_study
from meanbank.training import load_config
from meanbank.training.matching import memory_nbytes
from meanbank.training.planning import training_flops, training_tokens
from meanbank.training.run import open_data
from tests.studies.tiny_studies import SMALL, Timed, Weights, study_file

FULL = "quick/recall_full"


def test_what_an_arm_leaves_out_is_its_groups(tmp_path):
    file = study_file(
        tmp_path,
        seeds=[5, 6],
        tuning_seeds=[1],
        group={
            "config": "quick/recall_fixed",
            "arms": {
                "plain": {},
                "own": {
                    "config": "quick/recall_sqrt",
                    "label": "Mine",
                    "overrides": ["training.steps=9", "training.seed=3"],
                    "seeds": [8],
                    "evaluations": [{"type": "timed-for-tests", "name": "speed"}],
                },
                "short": "quick/recall_full",
            },
        },
        claims=[{"claim": "weights-for-tests@2(own) - weights-for-tests(short) > 0"}],
        not_testable=[{"says": "It is fast.", "source": "a paper", "why": "It needs a GPU."}],
    )
    study = load_study(file)
    assert (study.name, study.title) == ("tiny", "Tiny")
    plain, own, short = study.arms.values()
    assert plain.config == load_config("quick/recall_fixed", SMALL)
    assert own.config == load_config(
        "quick/recall_sqrt", [*SMALL, "training.steps=9", "training.seed=3"]
    )
    assert short.config == load_config("quick/recall_full", SMALL)
    assert [arm.label for arm in study.arms.values()] == ["KVM 8 rows", "Mine", "full attention"]
    assert [arm.seeds for arm in study.arms.values()] == [(5, 6), (8,), (5, 6)]
    assert plain.evaluations == (Weights(),)
    assert own.evaluations == (Weights(), Timed(name="speed"))
    assert own.seeded(8) == dataclasses.replace(
        own.config, training=dataclasses.replace(own.config.training, seed=8)
    )
    write_study(tmp_path / "out", study)
    assert read_study(tmp_path / "out") == study


def test_a_configuration_may_lie_beside_the_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    settings = "model: {hidden_size: 16, num_attention_heads: 2}\ndata: {source: recall}\n"
    (tmp_path / "mine.yaml").write_text(settings)
    study = load_study(study_file(tmp_path, group={"arms": {"a": "mine.yaml"}}))
    assert study.arms["a"].config.model["num_attention_heads"] == 2


ONE_LAYER = "model.num_hidden_layers=1"
WRONG = {
    "unknown arm in claims.0: 'fixd'; choose one of fixed": {
        "claims": [{"claim": "weights-for-tests(fixd) > 0"}]
    },
    "groups.recall.arms.grows: there is no configuration quick/recal": {
        "group": {"arms": {"grows": "quick/recal"}}
    },
    "unknown setting in training: 'stepz'; choose one of steps": {
        "group": {"overrides": ["training.stepz=3"]}
    },
    "unknown evaluation 'weight-for-tests'; choose one of weights-for-tests": {
        "group": {"evaluations": ["weight-for-tests"]}
    },
    "unknown setting in groups.recall: 'armz'; choose one of arms": {"group": {"armz": {}}},
    "unknown arm in groups.recall.reference: 'full'; choose one of fixed": {
        "group": {"reference": "full"}
    },
    "groups.recall: unknown arm in match.to: 'full'; choose one of": {
        "group": {"match": {"by": "tokens", "to": "full"}}
    },
    "groups.recall.match: context, in tokens, is for by: bytes": {
        "group": {"match": {"by": "bytes", "to": "grows"}}
    },
    "unknown groups.recall.match.by 'time'; choose one of": {
        "group": {"match": {"by": "time", "to": "grows"}}
    },
    "full: it cannot be matched to grows by bytes: its model.plan names no memory with a size": {
        "group": {
            "match": {"by": "bytes", "to": "grows", "context": 64},
            "arms": {"grows": "quick/recall_sqrt", "full": FULL},
        }
    },
    "matched to grows by tokens within 2 %: the nearest is training.steps=2, 336 instead of": {
        "group": {
            "match": {"by": "tokens", "to": "grows"},
            "arms": {
                "grows": "quick/recall_sqrt",
                "full": {"config": FULL, "overrides": ["data.batch_size=7"]},
            },
        }
    },
    "seed 7 of arm 'grows' is among the tuning_seeds, too": {"tuning_seeds": [0, 7]},
    "seeds must be distinct numbers from 0 to 2^63 - 1, got [1, 1]": {"seeds": [1, 1]},
    "seeds must be distinct numbers from 0 to 2^63 - 1, got [-1]": {"seeds": [-1]},
    f"seeds must be distinct numbers from 0 to 2^63 - 1, got [{2**63}]": {"seeds": [2**63]},
    "the name of the arm '../up' must be of letters": {"group": {"arms": {"../up": FULL}}},
    "there is no arm": {"group": {"arms": {}}},
    "the name of the arm 'a' differs from another's only in": {
        "groups": {"one": {"arms": {"a": FULL}}, "two": {"arms": {"A": FULL}}}
    },
    "the name of the group 'a.b' differs from another's only in": {
        "groups": {"a.b": {"arms": {"c": FULL}}, "a-b": {"arms": {"d": FULL}}}
    },
    "groups.recall.arms.a: expected a mapping of settings, got 3": {"group": {"arms": {"a": 3}}},
    "arms.a: it has no config, and neither has its group": {"group": {"arms": {"a": {}}}},
    "there are two evaluations 'weights-for-tests'; give one a name": {
        "group": {"evaluations": ["weights-for-tests", {"type": "weights-for-tests"}]}
    },
    "there are two arms 'grows'; names are unique": {
        "groups": {
            "one": {"arms": {"grows": FULL}},
            "two": {"arms": {"grows": FULL}},
        }
    },
    "claims.0: bpb(grows) is given by no evaluation of that arm; it has weights-for-tests": {
        "claims": [{"claim": "bpb(grows) < 1"}]
    },
    "claims.1: weights-for-tests2@8(fixed) is given by no evaluation of that arm; it has": {
        "claims": [{"claim": "weights-for-tests:a@8(grows) > 1"},
                   {"claim": "weights-for-tests(grows) > weights-for-tests2@8(fixed)"}]
    },
    "there are two evaluations 'bpb'; give one a name": {
        "group": {"evaluations": ["bpb"],
                  "arms": {"grows": {"config": FULL, "evaluations": ["bpb"]}}}
    },
    "not_testable.0: setting 'why' is required": {"not_testable": [{"says": "a", "source": "b"}]},
    "not_testable.0: why is empty; say it in a sentence": {
        "not_testable": [{"says": "a", "source": "b", "why": " "}]
    },
    "setting 'title' is required": {"title": None},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_told_in_one_line(message, tmp_path, capsys):
    file = study_file(tmp_path, **WRONG[message])
    if WRONG[message].get("title", "") is None:
        file.write_text("seeds: [1]\ngroups: {}\n")
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        main(["study", "run", str(file), "--out", str(out)])
    shown, errors = capsys.readouterr()
    assert (stop.value.code, shown) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith(f"meanbank: error: {file}: ")
    assert message in errors
    assert not out.exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("seeds: [1]\nseeds: [2]\n", "the key 'seeds' stands there twice"),
        ("groups:\n  a: {arms: {x: a, 'x': b}}\n", "the key 'x' stands there twice"),
        ("description: 2026-13-45\n", "month must be in 1..12"),
        ("seeds:\t[1\n\t]: 2\n", "is not valid YAML"),
        ("seeds: &s [*s]\n", "seeds.0 must be of type int, got [[...]]"),
        ("groups: &g {a: *g}\n", "unknown setting in groups.a: 'a'"),
        ("seeds: ['1']\n", "seeds.0 must be of type int, got '1'"),
        ("groups:\n", "groups must be a mapping of names, got None"),
        ("groups: {a: }\n", "groups.a: expected a mapping of settings, got None"),
        ("groups: {1: {arms: {a: quick/full}}, '1': {arms: {b: quick/full}}}\n", "'1'"),
    ],
)  # fmt: skip
def test_odd_yaml_is_told_in_one_line(lines, message, tmp_path, capsys):
    file, out = tmp_path / "odd.yaml", tmp_path / "out"
    file.write_text(f"title: Odd\n{lines}")
    with pytest.raises(SystemExit) as stop:
        main(["study", "run", str(file), "--out", str(out)])
    errors = capsys.readouterr().err
    assert (stop.value.code, errors.count("\n"), out.exists()) == (2, 1, False)
    assert str(file) in errors
    assert message in errors


@pytest.mark.parametrize("name", ["", ".", "/", "none.yaml", "../quick"])
def test_a_study_that_is_not_there(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["study", "show", name])
    errors = capsys.readouterr().err
    assert (stop.value.code, errors.count("\n")) == (2, 1)
    assert f"there is no study {name or repr(name)}; bundled ones are " in errors


def test_keys_may_be_merged_and_changed(tmp_path):
    file = tmp_path / "merged.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert read_yaml("file", file)["b"] == {"x": 3, "y": 2}


def test_show_tells_what_a_study_costs(tmp_path, capsys):
    file = study_file(tmp_path, tuning_seeds=[1, 2])
    with pytest.raises(SystemExit) as stop:
        main(["study", "show", str(file)])
    assert stop.value.code == 0
    tokens = 4 * (2 * 16 + 1 * 32)  # the first half of 3 steps are 2
    assert f"6 runs in all, {6 * tokens:,} training tokens" in capsys.readouterr().out


def counted(config):
    """Tokens and FLOPs of a run, batch by batch."""
    data = open_data(config)
    model = MeanbankForCausalLM(config.model_config(data.vocab_size))
    tokens, flops = 0, 0
    for step in range(config.training.steps):
        rows, length = data.batches.batch(step).input_ids.shape
        tokens += rows * length
        flops += rows * sum(part.total for part in flops_by_part(model, length).values())
    return tokens, flops


@pytest.mark.parametrize("by", ["tokens", "flops"])
def test_steps_are_set_for_equal_tokens_and_flops(by, tmp_path):
    arms = {
        "grows": {"config": "quick/recall_sqrt", "overrides": ["training.steps=101"]},
        "other": {"config": FULL, "overrides": ["data.batch_size=3", "training.warmup_steps=0"]},
    }
    study = load_study(
        study_file(tmp_path, group={"arms": arms, "match": {"by": by, "to": "grows"}})
    )
    other = study.arms["other"]
    (tokens, flops), (their_tokens, their_flops) = (
        counted(study.arms[name].config) for name in ("other", "grows")
    )
    assert training_tokens(other.config) == tokens
    with torch.device("meta"):
        model = MeanbankForCausalLM(other.config.model_config(112))
    assert training_flops(model, other.config) == pytest.approx(flops, rel=1e-12)
    ours, theirs = (tokens, their_tokens) if by == "tokens" else (flops, their_flops)
    assert ours == pytest.approx(theirs, rel=0.01)
    assert other.matched.ours == pytest.approx(ours, rel=1e-12)
    assert other.matched.difference_percent == pytest.approx(100 * (ours / theirs - 1))
    assert other.matched.overrides == (f"training.steps={other.config.training.steps}",)
    assert other.config == load_config(other.config_name, other.overrides)
    assert study.arms["grows"].matched is None


def test_parameters_are_matched_by_width_or_depth(tmp_path):
    arms = {
        "grows": "quick/recall_sqrt",
        "deep": {"config": FULL, "overrides": ["model.hidden_size=8"]},
    }
    match = {"by": "params", "to": "grows", "tolerance": 10}
    study = load_study(study_file(tmp_path, group={"arms": arms, "match": match}))
    theirs, ours = (  # in the order of the arms
        sum(p.numel() for p in MeanbankForCausalLM(arm.config.model_config(112)).parameters())
        for arm in study.arms.values()
    )
    assert ours == pytest.approx(theirs, rel=0.1)
    found = study.arms["deep"].matched
    assert (found.ours, found.theirs) == (ours, theirs)


KVM_OF = {"type": "kvm", "chunk_size": 4, "window_chunks": 2}
SIZED = {
    "fixed": ({**KVM_OF, "budget": {"type": "fixed", "count": 20}}, "budget.count"),
    "power": ({**KVM_OF, "budget": {"type": "power_law", "factor": 1}}, "budget.factor"),
    "saturating": ({**KVM_OF, "budget": {"type": "saturating", "limit": 9}}, "budget.limit"),
    "ovq": (
        {"type": "ovq", "chunk_size": 4, "budget": {"type": "saturating", "limit": 2000}},
        "budget.limit",
    ),
    "sliding": ({"type": "sliding_window", "window": 9}, "window"),
    "beside a window": (
        {"type": "ovq", "chunk_size": 4, "budget": {"type": "fixed", "count": 9}},
        "budget.count",
    ),
    "block": ({"type": "block_window", "block_size": 200, "blocks": 2}, "block_size"),
}


def test_memories_are_matched_by_their_one_number(tmp_path):
    tokens = 1000
    arms = {"grows": "quick/recall_sqrt"}
    for name, (memory, _) in SIZED.items():
        first = "{type: sliding_window, window: 4}" if "window" in name else "full"
        plan = f"model.plan=[{{memory: {first}}}, {{memory: {memory}}}]"
        arms[name.replace(" ", "_")] = {"config": FULL, "overrides": [plan]}
    match = {"by": "bytes", "to": "grows", "context": tokens, "tolerance": 3}
    study = load_study(study_file(tmp_path, group={"arms": arms, "match": match}))
    theirs = memory_nbytes(study.arms["grows"].config, tokens)
    for name, (_, setting) in SIZED.items():
        arm = study.arms[name.replace(" ", "_")]
        assert arm.matched.setting == setting
        assert arm.matched.overrides[0].startswith(f"model.plan.1.memory.{setting}=")
        assert arm.matched.theirs == theirs
        model = MeanbankForCausalLM(arm.config.model_config(112)).eval()
        ids = torch.arange(tokens)[None] % 112
        held, cache = 0, None
        for piece in ids.split([800] + 25 * [8], dim=1):
            with torch.no_grad():
                cache = model(input_ids=piece, cache=cache, use_cache=True).cache
            held = max(held, cache.nbytes())
        bound = memory_nbytes(arm.config, tokens)
        assert bound == arm.matched.ours == pytest.approx(theirs, rel=0.03), name
        assert 0.95 * bound < held <= bound, name


def test_sizes_of_memories():
    assert KVM(budget=PowerLaw(factor=3)).size_setting == "budget.factor"
    assert BlockWindow().size_setting == "block_size"


def test_arms_see_the_same_data_in_the_same_order(tmp_path):
    study = load_study(study_file(tmp_path))
    first, second = (open_data(arm.seeded(7)).batches for arm in study.arms.values())
    other = open_data(study.arms["grows"].seeded(8)).batches
    for step in range(3):
        assert torch.equal(first.batch(step).input_ids, second.batch(step).input_ids)
        assert not torch.equal(first.batch(step).input_ids, other.batch(step).input_ids)
