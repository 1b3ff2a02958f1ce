"""The plan of a run, what makes two runs comparable, and `meanbank plan`."""

import dataclasses
import json

import pytest
import yaml

from meanbank.cli import main
from meanbank.data import DataConfig
from meanbank.training import RunConfig, load_config
from meanbank.training.config import bundled_configs
from meanbank.training.matching import match, num_parameters
from meanbank.training.planning import plan_run, vocabulary

MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BANK = {**MODEL, "plan": [{"memory": "full"}, {"where": [1], "values": "bank"}]}


def write(folder, name: str, **settings) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code or 0


@pytest.fixture
def configs(tmp_path):
    """A bank with 2 layers, and a larger model of full attention."""
    data = {"vocab_size": 300, "sequence_length": 32, "batch_size": 4}
    larger = {**MODEL, "hidden_size": 64, "num_hidden_layers": 4, "plan": [{"memory": "full"}]}
    training = {"steps": 100, "recipe": "kvm"}
    return (
        write(tmp_path, "bank", model=BANK, data=data, training=training),
        write(tmp_path, "full", model=larger, data={**data, "batch_size": 6}, training=training),
    )


def test_budgets(configs):
    config = load_config(configs[0])
    plan = plan_run(config)
    assert (plan.tokens_per_step, plan.steps, plan.tokens) == (128, 100, 12800)
    assert plan.flops_per_token == sum(part.total for part in plan.flops.values())
    assert plan.training_flops == plan.tokens * plan.flops_per_token
    assert plan_run(config, tokens=1e6).steps == round(1e6 / 128)
    by_flops = plan_run(config, flops=plan.training_flops * 1.5)
    assert by_flops.steps == 150
    assert plan_run(config, flops=1).steps == 1
    papers = plan_run(config, convention="papers")
    assert papers.flops["attention"].total > plan.flops["attention"].total
    assert papers.flops["MLP"] == plan.flops["MLP"]


def test_groups_follow_the_recipe_and_the_steps(configs):
    config = load_config(configs[0])
    plan = plan_run(config)
    assert sum(group.elements for group in plan.groups) == plan.num_parameters
    table = next(
        group for group in plan.groups if group.elements == 300 * 32 and "table" in group.name
    )
    assert (table.learning_rate, table.weight_decay, table.tensors) == (0.15, 0.01, 1)
    head = next(group for group in plan.groups if group.name == "head")
    longer = next(g for g in plan_run(config, tokens=128 * 24000).groups if g.name == "head")
    assert head.betas == (0.9, 0.95)
    assert longer.learning_rate == pytest.approx(head.learning_rate / 2)  # sqrt(6000 / 24000)


def test_memory_tells_what_a_bank_saves(configs):
    memory = plan_run(load_config(configs[0])).memory
    assert memory.state == memory.tokens * (2 * 32 + 32 + 1) * 4 + (3 * 32 + 2 * 32 + 2 * 32) * 4
    assert memory.saved_by_banks == 32 * (32 - 1) * 4
    assert memory.tables == 300 * 32 * 4
    assert plan_run(load_config(configs[1])).memory.saved_by_banks == 0


def test_vocabulary(configs):
    config = load_config(configs[0])
    assert vocabulary(config) == 300
    padded = dataclasses.replace(config, data=dataclasses.replace(config.data, pad_vocab_to=64))
    assert vocabulary(padded) == 320
    recall = RunConfig(model=MODEL, data=DataConfig(source="recall", batch_size=10))
    assert vocabulary(recall) == 64 + 32 + 16
    plan = plan_run(recall)
    assert plan.sequence_length == 128
    assert plan.tokens_per_step == round(10 * (0.3 * 32 + 0.2 * 64 + 0.5 * 128))


def test_vocabulary_of_a_named_tokenizer(tmp_path):
    from meanbank.data.tokenizer import train_tokenizer

    train_tokenizer(["some text and more text"] * 9, 270).save(str(tmp_path / "tokenizer.json"))
    named = RunConfig(model=MODEL, data=DataConfig(tokenizer=str(tmp_path), pad_vocab_to=16))
    assert vocabulary(named) == 272
    absent = RunConfig(model=MODEL, data=DataConfig(tokenizer=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="no tokenizer"):
        plan_run(absent)


@pytest.mark.parametrize("by", ["params", "tokens", "flops"])
def test_match(by, configs):
    ours, theirs = configs
    reference = plan_run(load_config(theirs))
    wanted = {
        "params": reference.num_parameters,
        "tokens": reference.tokens,
        "flops": reference.training_flops,
    }[by]
    proposals = match(ours, theirs, by)
    assert [proposal.setting for proposal in proposals] == (
        ["hidden_size", "num_hidden_layers"] if by == "params" else ["steps"]
    )
    for proposal in proposals:
        plan = plan_run(load_config(ours, proposal.overrides))
        reached = {
            "params": plan.num_parameters,
            "tokens": plan.tokens,
            "flops": plan.training_flops,
        }[by]
        assert proposal.theirs == wanted
        assert proposal.ours == reached
        assert proposal.difference_percent == pytest.approx(100 * (reached / wanted - 1))


def test_match_finds_the_nearest_size(configs):
    ours, theirs = configs
    target = num_parameters(load_config(theirs))
    by_setting = {proposal.setting: proposal for proposal in match(ours, theirs, "params")}
    for setting, sizes in {
        "hidden_size": range(4, 200, 4),
        "num_hidden_layers": range(2, 40),
    }.items():
        counts = [num_parameters(load_config(ours, [f"model.{setting}={n}"])) for n in sizes]
        nearest = min(abs(count - target) for count in counts)
        assert abs(by_setting[setting].ours - target) == nearest


def test_match_keeps_the_proportion_of_an_mlp_and_proposes_no_impossible_depth(tmp_path, configs):
    data = {"vocab_size": 300}
    narrow = write(tmp_path, "narrow", model={**BANK, "intermediate_size": 64}, data=data)
    (width, _) = match(narrow, configs[1], "params")
    size, intermediate = (int(override.split("=")[1]) for override in width.overrides)
    assert intermediate == 2 * size // 32 * 32
    # layer 1 is named, so one layer, which would be nearest, is not possible
    small = write(tmp_path, "small", model={**MODEL, "num_hidden_layers": 1}, data=data)
    assert [proposal.setting for proposal in match(narrow, small, "params")] == ["hidden_size"]


def test_command(configs, tmp_path, capsys):
    ours, theirs = configs
    file = tmp_path / "plan.json"
    assert (
        run("plan", ours, "--set", "data.batch_size=8", "--tokens", "1e6", "--json", str(file)) == 0
    )
    shown = capsys.readouterr().out
    for words in ("bank tables", "attention", "tokens a step", "learning rate", "saved by banks"):
        assert words in shown
    written = json.loads(file.read_text())
    assert written["steps"] == round(1e6 / 256)
    assert f"{written['num_parameters']:,}" in shown
    assert f"{written['tokens']:,}" in shown

    assert run("plan", ours, "--match", theirs, "--by", "tokens", "--json", str(file)) == 0
    assert "--set training.steps=150" in capsys.readouterr().out
    assert json.loads(file.read_text())["proposals"][0]["overrides"] == ["training.steps=150"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NONE"], "there is no configuration"),
        (["OURS", "--flops", "0"], "flops must be a positive number"),
        (["OURS", "--tokens", "nan"], "tokens must be a positive number"),
        (["OURS", "--flops", "1e9", "--tokens", "1e9"], "not both"),
        (["OURS", "--match", "THEIRS"], "--match and --by belong together"),
        (["OURS", "--by", "params"], "--match and --by belong together"),
        (["OURS", "--match", "THEIRS", "--by", "flops", "--flops", "1e9"], "leave out --flops"),
        (["OURS", "--match", "NONE", "--by", "flops"], "there is no configuration"),
        (["OURS", "--set", "model.hidden_size=33"], "hidden_size"),
        (
            ["OURS", "--set", "training.warmup_steps=99", "--match", "SHORT", "--by", "tokens"],
            "warmup_steps",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, configs, tmp_path, capsys):
    places = {"OURS": configs[0], "THEIRS": configs[1], "NONE": str(tmp_path / "none.yaml")}
    places["SHORT"] = write(tmp_path, "short", model=MODEL, training={"steps": 1})
    assert run("plan", *(places.get(word, word) for word in arguments)) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.count("\n") == 1
    assert errors.startswith("meanbank: error: ")
    assert message in errors


def test_every_bundled_configuration_can_be_planned():
    root = bundled_configs()
    for path in sorted(root.rglob("*.yaml")):
        plan = plan_run(load_config(path))
        assert sum(group.elements for group in plan.groups) == plan.num_parameters, path
