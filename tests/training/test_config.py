"""Configurations: files, overrides, and one clear line for whatever is wrong."""

import re

import pytest
import yaml

from meanbank.core.config import yaml_value
from meanbank.memory import PowerLaw
from meanbank.training import KVMRecipe, PlainRecipe, load_config
from meanbank.training.config import bundled_configs
from meanbank.training.run import open_data

BUNDLED = sorted(bundled_configs().rglob("*.yaml"))


@pytest.mark.parametrize(
    "path", BUNDLED, ids=lambda path: str(path.relative_to(bundled_configs()).with_suffix(""))
)
def test_bundled_configurations_load(path, monkeypatch):
    config = load_config(path)
    assert config.description
    model = config.model_config(vocab_size=100)
    assert len(model.plans()) == model.num_hidden_layers
    name = str(path.relative_to(bundled_configs()).with_suffix(""))
    assert load_config(name) == config


def test_overrides(config_file):
    config = load_config(
        config_file,
        [
            "training.steps=9",
            "model.plan.0.memory.budget.factor=8",
            "training.recipe.learning_rate=1e-3",
            "data.vocab_size=400",
            "training.warmup_steps=0",
        ],
    )
    assert config.training.steps == 9
    assert config.training.recipe == KVMRecipe(learning_rate=1e-3)
    assert config.model_config(10).plans()[0].memory.budget == PowerLaw(factor=8.0)
    assert load_config(config_file, ["training.recipe=plain"]).training.recipe == PlainRecipe()
    plan = "model.plan=[{memory: full}]"
    assert load_config(config_file, [plan]).model_config(10).plans()[0].memory.tag == "full"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stesp=3", "unknown setting in training: 'stesp'; choose one of steps"),
        ("training.steps=many", "training.steps must be of type int, got 'many'"),
        ("training.steps=0", "steps must be at least 1"),
        ("training.steps", "must look like"),
        ("training.steps=[", "not YAML"),
        ("training.steps.x=3", "not a group of settings"),
        ("model.plan.4.memory=full", "'4' is not an entry"),
        ("model.plan.0.memory.type=kmv", "unknown memory 'kmv'; choose one of kvm"),
        (
            "model.hidden_sise=3",
            "unknown setting in model: 'hidden_sise'; choose one of hidden_size",
        ),
        ("model.vocab_size=3", "unknown setting in model"),
        ("model.hidden_size=33", "not divisible"),
        ("model.hidden_size=wide", "model:"),
        ("model.plan.0.memory.budget=quadratic", "unknown budget 'quadratic'"),
        ("model.plan.1.values=bnak", "unknown value source 'bnak'; choose one of bank"),
        ("model.backbone=gptalpha", "unknown backbone 'gptalpha'; choose one of gptalpha2"),
        ("data.source=web:x", "unknown data source"),
        ("data.pad_vocab_to=0", "data.pad_vocab_to must be at least 1"),
        ("training.recipe=adam", "unknown recipe"),
        ("training.warmup_steps=7", "warmup_steps must be between"),
        ("training.seed=-1", "seed must not be negative"),
        ("training.device=tpu", "choose one of"),
        ("model=3", "mapping"),
        ("training.recipe={type: plain, learning_rate: .inf}", "must be finite"),
        ("training.recipe={type: plain, learning_rate: .nan}", "must be finite"),
        ("training.recipe={type: kvm, reference_steps: 0}", "reference_steps must be at least 1"),
        ("training.evaluation_tokens=0", "evaluation_tokens must be at least 1"),
        ("model.plan.0.memory.budget={type: fixed, cap: 0}", "cap must be at least 1"),
        ("model.plan.0.memory.budget={type: fixed, min_rows: -5}", "min_rows must not be negative"),
        ("model.plan.0.memory.budget={type: power_law, exponent: 400}", "at most 1"),
        ("model.plan.0.where=3", "where must be"),
        ("model.plan.0.where=[true]", "there is no layer True"),
        ("model.plan.0.memory={type: full, window: 3}", "there are none here"),
        ("model.rope_theta=.inf", "rope_theta must be positive"),
        ("model.num_hidden_layers=true", "must be a positive integer"),
        ("model.eos_token_id=5", "unknown setting in model"),
        ("model.residual_scale=big", "residual_scale must be a number"),
    ],
)
def test_wrong_settings_are_one_clear_line(config_file, override, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_config(config_file, [override])
    assert "\n" not in str(error.value)


def test_wrong_files_are_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="there is no configuration"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ValueError, match=r"bundled ones are .*quick/kvm_sqrt.* more in") as error:
        load_config("quick/kvm_sqt")
    assert len(str(error.value)) < 500
    broken = {"a: [": "not valid YAML", "3": "must hold a mapping", "{}": "'model' is required"}
    for text, message in broken.items():
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(path)


def test_a_saved_configuration_is_the_same(config_file, tmp_path):
    config = load_config(config_file)
    path = tmp_path / "saved.yaml"
    path.write_text(yaml.safe_dump(config.plain()))
    assert load_config(path) == config


def test_the_models_vocabulary_is_padded(config_file):
    config = load_config(config_file, ["data.pad_vocab_to=64"])
    plain, padded = open_data(load_config(config_file)), open_data(config)
    assert plain.corpus is not None
    assert padded.corpus is not None
    assert plain.vocab_size == plain.corpus.vocab_size == padded.corpus.vocab_size
    assert padded.vocab_size == -(-plain.vocab_size // 64) * 64 > plain.vocab_size
    assert padded.vocab_size == config.model_config(padded.vocab_size).vocab_size
    assert padded.corpus.fingerprint == plain.corpus.fingerprint
    assert padded.batches.batch(0).input_ids.max() < plain.vocab_size
    recall = load_config("quick/recall_full", ["data.pad_vocab_to=100"])
    assert open_data(recall).vocab_size == recall.data.model_vocab_size() == 200


def test_file_patterns_become_absolute(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(config_file, ["data.source=files:corpus/*.txt"])
    assert config.data.source == f"files:{tmp_path}/corpus/*.txt"
    assert config == load_config(config_file)


@pytest.mark.parametrize("value", ["!!bool maybe", "!!int ''", "!!timestamp x", "!!float x", "[1"])
def test_what_is_no_yaml_is_one_line(value, config_file, tmp_path):
    with pytest.raises(ValueError, match="is not YAML"):
        load_config(config_file, [f"training.steps={value}"])
    path = tmp_path / "bad.yaml"
    path.write_text(f"training: {{steps: {value}}}")
    with pytest.raises(ValueError, match="is not valid YAML"):
        load_config(path)
    with pytest.raises(ValueError, match="is not YAML"):
        yaml_value(value)
