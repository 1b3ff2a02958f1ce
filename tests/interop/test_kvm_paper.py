"""KVM authors' folders: every key accounted for, refused options named, round trips bit-equal."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.cli import main
from meanbank.interop import export_kvm_paper, import_kvm_paper, kvm_paper
from meanbank.interop.kvm_export import to_theirs
from meanbank.interop.kvm_fields import DEFAULTS, mlp_width, to_ours
from meanbank.model.accounting import empty_model

KVM = {"type": "kvm", "chunk_size": 4, "budget": {"type": "power_law", "factor": 2}}
SWA = {"memory": {"type": "sliding_window", "window": 6}, "address": {"rotary_fraction": 1.0}}
EVEN = {"where": "even", **SWA}
PLANS = {
    "kvm": [{"memory": KVM}],
    "kvm_fixed": [{"memory": {**KVM, "budget": {"type": "fixed", "count": 9}, "sink": 2}}],
    "kvm_limits": [
        {
            "memory": {
                **KVM,
                "budget": {"type": "power_law", "min_rows": 6, "cap": 12, "multiple": 2},
            }
        }
    ],
    "kvm_ablated": [
        {
            "memory": {
                **KVM,
                "temperatures": "none",
                "value_scale": "chunk_count",
                "gated_writes": ["initial", "append", "merge"],
                "gated_parts": ["value"],
            }
        }
    ],
    "kvm_no_gate": [{"memory": {**KVM, "merge_gate": "none"}}],
    "hybrid": [{"memory": {**KVM, "budget": {"type": "saturating", "limit": 12}}}, EVEN],
    "full": [{"memory": "full"}],
    "nope": [{"memory": "full", "address": {"rotary_fraction": 0.0}}, EVEN],
    "block_window": [{"memory": {"type": "block_window", "block_size": 4, "blocks": 3, "sink": 1}}],
    "ovq": [
        {"memory": {"type": "ovq", "chunk_size": 4, "budget": {"type": "saturating", "limit": 8}}},
        EVEN,
    ],
    "rwkv7": [{"memory": "rwkv7"}],
    "every_third": [{"memory": KVM}, {"where": [0, 3], **SWA}],
    "linear": [{"memory": "full", "values": {"type": "projection", "residual": "linear"}}],
    "plain": [
        {
            "memory": "full",
            "values": {"type": "projection", "residual": "none", "shift": "none"},
            "address": {"token_shift": "none"},
        }
    ],
    "dead_shift": [
        {
            "memory": KVM,
            "values": {"type": "projection", "shift": "none"},
            "address": {"token_shift": "none"},
        }
    ],
}


def make(folder, plan, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    config = MeanbankConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "plan": plan,
            **sizes,
        }
    )
    model = MeanbankForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(plan, dtype, tmp_path):
    model = make(tmp_path / "ours", PLANS[plan], dtype)
    export_kvm_paper(tmp_path / "ours", tmp_path / "theirs")
    import_kvm_paper(tmp_path / "theirs", tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").eval()
    assert again.config.layers == model.config.layers
    assert again.dtype == dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    ids = torch.randint(40, (1, 21))
    assert torch.equal(again(ids).logits, model(ids).logits)
    export_kvm_paper(tmp_path / "again", tmp_path / "theirs_again")
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "theirs_again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("theirs", "theirs_again")
    ]
    assert configs[0] == configs[1]


def test_how_it_is_computed_is_not_told(tmp_path):
    make(tmp_path / "ours", [{"memory": {**KVM, "backend": "reference"}}], torch.float32)
    export_kvm_paper(tmp_path / "ours", tmp_path / "theirs")
    import_kvm_paper(tmp_path / "theirs", tmp_path / "again")


def test_grouped_queries_and_head_sizes(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "value_head_dim": 6}
    model = make(tmp_path / "ours", PLANS["kvm"], **sizes)
    export_kvm_paper(tmp_path / "ours", tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    assert tensors["transformer.h.0.attn.c_v.weight"].shape == (12, 64)
    assert tensors["transformer.h.0.attn.v_gate0"].shape == (1, 1, 12)
    import_kvm_paper(tmp_path / "theirs", tmp_path / "again")
    again = MeanbankForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.layers == model.config.layers
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def their_folder(tmp_path, plan="kvm"):
    make(tmp_path / "ours", PLANS[plan])
    export_kvm_paper(tmp_path / "ours", tmp_path / "theirs")
    return tmp_path / "theirs"


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_skip_connections": 1}, "use_skip_connections is 1"),
        ({"use_block_lambdas": 1}, "use_block_lambdas"),
        ({"logit_softcap": 30.0}, "logit_softcap is 30.0"),
        ({"use_l2wrap": 1}, "use_l2wrap"),
        ({"alt_share_v0": 1}, "alt_share_v0"),
        ({"ovq_use_delta_rule": 1}, "ovq_use_delta_rule"),
        ({"use_state_decay": 1}, "use_state_decay"),
        ({"token_mixer": "kda"}, "token_mixer 'kda' is outside"),
        ({"kvm_value_residual_mode": "rwkv_post_tokenshift"}, "rwkv_post_tokenshift"),
        ({"kvm_token_shift_mode": "rwkv6"}, "kvm_token_shift_mode 'rwkv6'"),
        ({"token_mixer_class_path": "os.system"}, "token_mixer_class_path 'os.system'"),
        ({"model_class_path": "x.Y"}, "model_class_path"),
        ({"rope_partial_dim": 0}, "zeroes whole keys"),
        ({"colour": 1, "n_hoops": 2}, "unknown settings in the configuration: colour, n_hoops"),
        ({"model_type": "llama"}, "model_type must be 'rwkv7backbone', got 'llama'"),
        ({"state_budget_mode": "linear"}, "state_budget_mode 'linear'"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be of type int"),
        ({"hidden_size": None}, "hidden_size must be of type int"),
        ({"vocab_size": 10**18}, "vocab_size must be of type int"),
        ({"num_attention_heads": 0}, "num_attention_heads must be of type int from 1"),
        ({"token_mixer": ["kvm"]}, "token_mixer must be of type str"),
        ({"kvm_use_vlens": "0"}, "kvm_use_vlens must be of type int"),
        ({"ffn_expansion": float("inf")}, "ffn_expansion must be of type float"),
        (
            {"alt_layer_every": 2, "alt_token_mixer": "kvm", "alt_rope_partial_dim": 16},
            "two first layers",
        ),
        ({"hidden_size": 32}, "must hold"),
        ({"num_hidden_layers": 5}, "lacks transformer.h.4"),
        ({"num_hidden_layers": 3}, "unknown to its configuration, transformer.h.3"),
        ({"kvm_use_head_temps": 0}, "front_head_temp"),
    ],
)
def test_what_does_not_fit_is_named(fields, message, tmp_path, capsys):
    folder = their_folder(tmp_path)
    change(folder, **fields)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["import", "kvm-paper", str(folder), str(tmp_path / "again")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "again").exists()
    assert not list(tmp_path.glob(".again*"))


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(DEFAULTS)),
    value=st.sampled_from([None, "", "2", -1, 0, 1, 2.5, True, [], {}, 10**30, float("nan")]),
)
def test_a_strange_value_is_read_or_refused_in_one_line(name, value):
    fields = {"model_type": "rwkv7backbone", "token_mixer": "kvm", name: value}
    try:
        to_ours({"num_hidden_layers": 2, **fields})
    except ValueError as error:
        assert "\n" not in str(error)


def test_what_is_off_in_their_ways_is_off(tmp_path):
    folder = their_folder(tmp_path)
    change(folder, alt_layer_every=None, state_round_down=None, swa_window_size=None)
    import_kvm_paper(folder, tmp_path / "again")
    change(folder, alt_layer_every=1)  # in their code as good as off
    import_kvm_paper(folder, tmp_path / "third")
    theirs = {"model_type": "rwkv7backbone", "token_mixer": "swa", "swa_window_size": 0}
    assert to_ours(theirs).plans()[0].memory.window == 256


def test_damaged_folders_of_ours_are_not_exported(tmp_path, capsys):
    make(tmp_path / "ours", PLANS["kvm"])
    weights = tmp_path / "ours" / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)

    def export_fails(message):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["export", "kvm-paper", str(tmp_path / "ours"), str(tmp_path / "theirs")])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "theirs").exists()

    save_file({n: t for n, t in tensors.items() if "mlp.up" not in n}, weights)
    export_fails("lacks model.layers.0.mlp.up.weight")
    save_file({**tensors, "more": torch.zeros(2)}, weights)
    export_fails("unknown to its configuration, more")
    weights.write_bytes(whole[:-9])
    export_fails("cannot read")
    weights.write_bytes(whole)
    change(tmp_path / "ours", hidden_size=32)
    export_fails("must hold")


def test_mixed_dtypes_become_the_widest(tmp_path):
    folder = their_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    conversion = import_kvm_paper(folder, tmp_path / "again")
    assert conversion.model().dtype == torch.float32
    assert torch.equal(conversion.model().lm_head.weight, tensors["lm_head.weight"])
    again = MeanbankForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert torch.equal(again.lm_head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("width", range(64, 520, 8))
def test_any_width_is_read_back(width):
    for intermediate in range(32, 4 * width + 32, 32):
        config = MeanbankConfig(
            vocab_size=8,
            hidden_size=width,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=intermediate,
        )
        assert mlp_width(width, to_theirs(config)["ffn_expansion"]) == intermediate
        if intermediate > 256:  # some are enough
            break


def test_fields_that_do_not_matter_are_let_through(tmp_path):
    folder = their_folder(tmp_path)
    change(
        folder,
        kda_conv_size=9,
        lact_chunk_size=7,
        kvm_aotriton_precompiled_forward=1,
        mup_base_dim=512,
        auto_map={"AutoConfig": "evil.Config"},
        token_mixer_class_path="model.kvm_triton_mixer.SequenceMixer",
        torch_dtype="float32",
        transformers_version="4.57.0",
    )
    import_kvm_paper(folder, tmp_path / "again")
    assert not list((tmp_path / "again").glob("*.py"))


def test_their_defaults_fill_in_what_a_configuration_leaves_out():
    config = to_ours({"model_type": "rwkv7backbone", "token_mixer": "kvm"})
    (plan,) = {str(p): p for p in config.plans()}.values()
    assert plan.memory.chunk_size == 256
    assert plan.memory.budget.rows(10_000) == 1  # state_min_len -1: the first chunk's rows only
    assert plan.address.rotary_fraction == 0.5
    assert plan.address.token_shift == "none"
    assert plan.values.residual == "gated"
    assert config.mlp_token_shift is False
    assert config.residual_scale == 1.0
    assert config.plans()[0].memory.window_chunks == 2


def test_a_dead_shift_is_dropped_and_told(tmp_path, capsys):
    folder = their_folder(tmp_path, "dead_shift")
    with pytest.raises(SystemExit) as stop:
        main(["import", "kvm-paper", str(folder), str(tmp_path / "again")])
    assert stop.value.code == 0
    assert "dropped transformer.h.0.attn.x_v: read nowhere" in capsys.readouterr().out


def test_shards_and_tokenizers_come_along(tmp_path):
    folder = their_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer.json").write_text("{}")
    import_kvm_paper(folder, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../../secret"}}))
    with pytest.raises(ValueError, match="lists no files of that folder"):
        import_kvm_paper(folder, tmp_path / "third")


def test_pickles_and_damage_are_refused(tmp_path):
    folder = their_folder(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="cannot read"):
        import_kvm_paper(folder, tmp_path / "again")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="other formats are not read"):
        import_kvm_paper(folder, tmp_path / "again")
    (folder / "config.json").write_text("[")
    with pytest.raises(ValueError, match="not valid JSON"):
        import_kvm_paper(folder, tmp_path / "again")
    with pytest.raises(ValueError, match="cannot read"):
        import_kvm_paper(tmp_path / "nowhere", tmp_path / "again")


def test_nothing_is_overwritten(tmp_path):
    folder = their_folder(tmp_path)
    with pytest.raises(ValueError, match="exists already"):
        import_kvm_paper(folder, tmp_path / "ours")
    with pytest.raises(ValueError, match="exists already"):
        export_kvm_paper(tmp_path / "ours", folder)


@pytest.mark.parametrize(
    ("plan", "sizes", "message"),
    [
        ([{"values": "bank"}], {}, "no bank values"),
        ([{"values": {"type": "projection", "scale": "learned"}}], {}, "layer 0: values"),
        ([{"memory": {**KVM, "append": "random"}}], {}, "layer 0: memory"),
        ([{"memory": {**KVM, "value_scale": "count"}}], {}, "layer 0: memory"),
        ([{"memory": {"type": "sliding_window", "sink": 1}}], {}, "layer 0: memory"),
        ([{"memory": KVM}, {"where": [0, 1], **SWA}], {}, "cannot express"),
        (
            [{"memory": KVM}, {"where": [0], **SWA}, {"where": [1], "memory": "full"}],
            {},
            "two kinds",
        ),
        ([{}], {"backbone": "nanochat"}, "no nanochat backbone"),
        ([{"memory": KVM}], {"intermediate_size": 100}, "intermediate_size"),
    ],
)
def test_what_their_format_lacks_is_told(plan, sizes, message):
    config = MeanbankConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "plan": plan,
            **sizes,
        }
    )
    with pytest.raises(ValueError, match=message):
        to_theirs(config)


def test_every_parameter_has_their_name_and_shape():
    config = to_ours({"model_type": "rwkv7backbone", "vocab_size": 64})
    parameters = dict(empty_model(config).named_parameters())
    names = {kvm_paper.their_name(name, config) for name in parameters}
    assert len(names) == len(parameters)
    assert "transformer.h.3.attn.w1.weight" in names
    assert kvm_paper.their_shape("transformer.h.3.attn.x_w", torch.Size([8]), config) == (1, 1, 8)
