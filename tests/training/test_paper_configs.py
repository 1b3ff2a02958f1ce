"""The papers' own configurations: sizes, schedules and headers, without any of their data."""

import functools
import re

import pytest
import torch
import yaml

from meanbank.cli import main
from meanbank.model import MeanbankForCausalLM
from meanbank.training.config import RunConfig, bundled_configs, load_config

PAPER = bundled_configs() / "paper"
FILES = {
    path.relative_to(PAPER).with_suffix("").as_posix(): path
    for path in sorted(PAPER.rglob("*.yaml"))
}

# Parameters of the authors' own models. Where a layer's values are not projected they keep a W_V
# that nothing reads; it counts here as "dead" and we have none.
KVM_PARAMETERS = {
    "kvm-120m/kvm256": 162_942_096,
    "kvm-120m/kvm-sqrt16": 162_942_096,
    "kvm-120m/swa-kvm-saturating1024": 162_912_840,
    "kvm-120m/gpta2": 162_883_584,
    "kvm-120m/swa-ovq": 162_880_548,
    "kvm-120m/bswa": 162_883_584,
    "kvm-350m/kvm256": 407_026_048,
    "kvm-350m/kvm-sqrt16": 407_026_048,
    "kvm-350m/gpta2": 406_822_912,
}
D12_DEAD, D24_DEAD = 4 * 768**2, 8 * 1536**2
BOV_PARAMETERS = {  # in all, dead, steps
    "bov-d12/standard": (135_266_329, 0, 3766),
    "bov-d12/bank": (235_929_629, D12_DEAD, 3838),
    "bov-d12/bank-fixed": (235_929_625, D12_DEAD, 3838),
    "bov-d12/bank-shared": (160_432_157, D12_DEAD, 3838),
    "bov-d12/first-layer": (135_266_333, D12_DEAD, 3838),
    "bov-d12/initial-embedding": (135_266_333, 0, 3766),
    "bov-d12/initial-embedding-fixed": (135_266_329, 0, 3766),
    "bov-d12/scaled": (135_266_333, 0, 3766),
    "bov-d12/mixed-first-layer": (135_266_337, 0, 3766),
    "bov-d12/mixed-initial-embedding": (135_266_337, 0, 3697),
    "bov-d12/mixed-bank": (235_929_633, 0, 3766),
    "bov-d12/gated-additive": (235_929_913, 0, 3766),
    "bov-d24/standard": (780_140_569, 0, 7809),
    "bov-d24/bank": (1_182_793_761, D24_DEAD, 7998),
    "bov-d24/bank-fixed": (1_182_793_753, D24_DEAD, 7998),
    "bov-d24/bank-shared": (830_472_225, D24_DEAD, 7998),
    "bov-d24/first-layer": (780_140_577, D24_DEAD, 7998),
    "bov-d24/initial-embedding": (780_140_577, 0, 7809),
    "bov-d24/initial-embedding-fixed": (780_140_569, 0, 7809),
    "bov-d24/scaled": (780_140_577, 0, 7809),
    "bov-d24/mixed-first-layer": (780_140_585, 0, 7809),
    "bov-d24/mixed-initial-embedding": (780_140_585, 0, 7628),
    "bov-d24/mixed-bank": (1_182_793_769, 0, 7809),
    "bov-d24/gated-additive": (1_182_794_905, 0, 7809),
}
# Layers, width, heads, sequence length, rows a step, warm-up.
SIZES = {
    "kvm-120m": (12, 768, 6, 8192, 64, 200),
    "kvm-350m": (24, 1024, 8, 8192, 64, 200),
    "bov-d12": (12, 768, 6, 2048, 256, 40),
    "bov-d24": (24, 1536, 12, 2048, 512, 40),
}
TOKENS_A_STEP = {"kvm-120m": 2**19, "kvm-350m": 2**19, "bov-d12": 2**19, "bov-d24": 2**20}
every_file = pytest.mark.parametrize("name", FILES)


@functools.cache
def load(name: str) -> RunConfig:
    return load_config(f"paper/{name}")


@functools.cache
def build(name: str) -> MeanbankForCausalLM:
    """The model without its numbers."""
    config = load(name)
    vocabulary = config.data.model_vocab_size()
    assert vocabulary is not None
    with torch.device("meta"):
        return MeanbankForCausalLM(config.model_config(vocabulary))


def parameters(model: MeanbankForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def header(name: str) -> str:
    """The comment at the top, on one line."""
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    top = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.lstrip("# ").rstrip("\\ ") for line in top)


def test_every_experiment_has_a_file():
    counts = {folder: sum(name.startswith(folder + "/") for name in FILES) for folder in SIZES}
    assert counts == {"kvm-120m": 13, "kvm-350m": 9, "bov-d12": 18, "bov-d24": 14}
    assert sum(counts.values()) == len(FILES)
    assert set(FILES) >= set(KVM_PARAMETERS) | set(BOV_PARAMETERS)


@every_file
def test_sizes_and_tokens_a_step(name):
    config, folder = load(name), name.split("/")[0]
    model = config.model_config(2)
    assert SIZES[folder] == (
        model.num_hidden_layers,
        model.hidden_size,
        model.num_attention_heads,
        config.data.sequence_length,
        config.data.batch_size,
        config.training.warmup_steps,
    )
    assert config.data.sequence_length * config.data.batch_size == TOKENS_A_STEP[folder]
    if folder.startswith("kvm"):
        assert (model.backbone, config.training.recipe.tag) == ("gptalpha2", "kvm")
        assert config.data.model_vocab_size() == 50304
        assert config.training.steps == {"kvm-120m": 6000, "kvm-350m": 15000}[folder]
    else:
        assert (model.backbone, config.training.recipe.tag) == ("nanochat", "bov")
        assert config.data.model_vocab_size() == 32768


@pytest.mark.parametrize(("name", "count"), KVM_PARAMETERS.items())
def test_kvm_models_have_the_authors_parameters(name, count):
    assert parameters(build(name)) == count


@pytest.mark.parametrize(("name", "expected"), BOV_PARAMETERS.items())
def test_bov_models_have_the_authors_parameters_and_steps(name, expected):
    config = load(name)
    count, dead, steps = expected
    assert parameters(build(name)) + dead == count
    assert config.training.steps == steps


@every_file
def test_the_recipe_has_a_group_for_every_parameter(name):
    config = load(name)
    model = build(name)
    groups = config.training.recipe.optimizer(model, config.training.steps).param_groups
    assert sum(p.numel() for group in groups for p in group["params"]) == parameters(model)


def test_learning_rates_of_the_larger_models():
    """Peak rate and decay by group, as the authors' code computes them."""
    expected = {
        "kvm-350m/kvm256": {
            "matrices": (9.486825e-4, 0.1686547),
            "head": (9.486825e-4, 0.1686547),
            "embedding": (1.26491e-3, 0.126491),
            "low-rank factors": (1.26491e-3, 0.126491),
            "vectors": (1.26491e-3, 0.0),
        },
        "bov-d24/bank": {
            "matrices": (0.0282842712, 0.0597383330),
            "head": (0.008, 0.01),
            "embedding": (0.3, 0.001),
            "smear": (0.2, 0.0),
            "tables": (0.15, 0.01),
            "scales": (0.7071067812, 0.0),
        },
    }
    for name, groups in expected.items():
        config = load(name)
        optimizer = config.training.recipe.optimizer(build(name), config.training.steps)
        found = {
            group["name"]: (group["peak_lr"], group["peak_weight_decay"])
            for group in optimizer.param_groups
        }
        assert found.keys() == groups.keys()
        for group, rates in groups.items():
            assert found[group] == pytest.approx(rates, rel=2e-6)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("bov")])
def test_windows_are_short_short_short_long(name):
    """A window of the authors sees that many tokens before a token, and the token."""
    windows = [plan.memory.window - 1 for plan in load(name).model_config(2).plans()]
    assert windows == [512, 512, 512, 2048] * (len(windows) // 4)


def test_the_target_layers_of_banks():
    targets = {
        "bank": range(8, 12),
        "bank-every-layer": range(12),
        "bank-last-two-thirds": range(4, 12),
        "bank-second-half": range(6, 12),
        "bank-every-other": range(1, 12, 2),
    }
    for name, layers in targets.items():
        plans = load(f"bov-d12/{name}").model_config(2).plans()
        assert [i for i, plan in enumerate(plans) if plan.values.tag == "bank"] == list(layers)


@pytest.mark.parametrize("name", [name for name in FILES if "swa" in name and "bswa" not in name])
def test_hybrids_alternate(name):
    plans = load(name).model_config(2).plans()
    fractions = {"kvm": 0.5, "ovq": 0.0, "full": 0.0 if "nope" in name else 0.5}
    for layer, plan in enumerate(plans):
        if layer % 2 == 0:
            assert (plan.memory.tag, plan.memory.window) == ("sliding_window", 256)
            assert plan.address.rotary_fraction == 1
        else:
            assert plan.address.rotary_fraction == fractions[plan.memory.tag]


@every_file
def test_the_header_says_how_to_run_it_and_on_what(name):
    config, said = load(name), header(name)
    folder = name.split("/")[0]
    command = f"torchrun --nproc-per-node 8 -m meanbank train configs/paper/{name}.yaml"
    assert f"{command} --out runs/{name}" in re.sub(r"\s+", " ", said)
    assert "several processes is not built yet" in said
    assert config.data.source in said
    if folder.startswith("kvm"):
        assert "2605.09877" in said
        for data in ("hf:gpt2", "hf:SmerkyG/dclm-10B", "hf:princeton-nlp/TextbookChapters"):
            assert data in said
    else:
        assert "2606.02780" in said
    steps, step = config.training.steps, TOKENS_A_STEP[folder]
    assert f"{steps * step:,} tokens in all: {steps:,} steps of {step:,}" in said
    assert f"{parameters(build(name)):,} parameters" in said


def test_no_two_files_say_the_same():
    said = {}
    for name in FILES:
        config = load(name).plain()
        description = config.pop("description")
        for key in (yaml.safe_dump(config), (name.split("/")[0], description)):
            assert key not in said, f"{name} says the same as {said[key]}"
            said[key] = name


def test_one_process_of_a_launcher_is_fine(config_file, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as stop:
        main(["train", str(config_file), "--out", str(tmp_path / "run")])
    assert not stop.value.code
