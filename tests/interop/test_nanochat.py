"""nanochat checkpoints: every key accounted for, refused options named, only tensors unpickled."""

import json
import os
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from meanbank.cli import main
from meanbank.interop import import_nanochat, nanochat
from meanbank.model.accounting import empty_model

SIZES = {"sequence_len": 64, "vocab_size": 100, "n_layer": 6, "n_head": 2, "n_kv_head": 1}
SIZES |= {"n_embd": 32, "window_pattern": "SL"}
LAST_THIRD = [4, 5]
VARIANTS = {
    "standard": {},
    "bank": {"v_from_value_emb": True, "learn_init_coeffs": True},
    "bank_fixed": {"v_from_value_emb": True},
    "bank_shared": {"v_from_value_emb": True, "value_emb_shared": True},
    "bank_second_half": {"v_from_value_emb": True, "on_second_half_layers": True},
    "first_layer": {"v_from_v1": True},
    "first_layer_everywhere": {"v_from_v1": True, "on_every_layer": True},
    "first_layer_per_head": {"v_from_v1": True, "learn_init_scaling_vec": True},
    "first_layer_every_two": {"v_from_v1": True, "on_every_two_layers": True},
    "initial_embedding": {"v_from_x0": True, "learn_init_coeffs": True},
    "mixed_first_layer": {"add_init_v": True, "learn_init_coeffs": True},
    "mixed_initial": {"add_init_res_v": True},
    "mixed_bank": {"add_init_value_emb": True, "learn_init_coeffs": True},
    "gated": {"add_init_value_emb_nanogpt": True, "on_last_two_thirds_layers": True},
    "scaled": {"v_scale_learn": True, "learn_init_coeffs": True},
}


def their_tensors(fields):
    """Random weights under their names and in their shapes, made from ours."""
    config, renamed = nanochat.to_ours(fields), {}
    probe = {}

    def note(our, given, their_name, dead, cut):
        names = {name: their_name(name) for name, _ in empty_model(our).named_parameters()}
        probe.update(names=names, dead=dead)
        raise LookupError

    original, nanochat.conversion.convert = nanochat.conversion.convert, note
    try:
        nanochat.convert(fields, {})
    except LookupError:
        pass
    finally:
        nanochat.conversion.convert = original
    torch.manual_seed(0)
    shapes = {name: p.shape for name, p in empty_model(config).named_parameters()}
    for ours, theirs in probe["names"].items():
        shape = shapes[ours]
        if shape[:1] == (100,):
            shape = (128, *shape[1:])  # padded to a multiple of 64
        renamed[theirs] = torch.randn(shape or (1,)) * 0.2
    for theirs in probe["dead"]:
        renamed[theirs] = torch.randn(16, 32)
    return renamed


def write(folder, fields, tensors, step=7, **meta):
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / f"model_{step:06d}.pt")
    described = {"step": step, "model_type": "gpt_base", "model_config": fields, **meta}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(described))
    (folder / f"optim_{step:06d}_rank0.pt").write_bytes(b"never opened")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_read(variant, tmp_path):
    fields = {**SIZES, **VARIANTS[variant]}
    tensors = their_tensors(fields)
    write(tmp_path / "theirs", fields, {f"_orig_mod.{n}": t for n, t in tensors.items()})
    conversion = import_nanochat(tmp_path / "theirs", tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for ours, theirs in conversion.names.items():
        parameter = model.get_parameter(ours)
        wanted = tensors[theirs][:100] if parameter.shape[:1] == (100,) else tensors[theirs]
        assert torch.equal(parameter.reshape(-1), wanted.reshape(-1)), theirs
    replaced = variant.startswith(("bank", "first_layer"))
    dead = (
        "c_v.weight",
        ".0.attn.gamma_v",
        ".0.attn.lambda_v",
        ".0.attn.alpha_v",
        ".0.attn.beta_v",
    )
    assert all(name.endswith(dead) for name in conversion.dropped)
    assert bool(conversion.dropped) == replaced
    assert model(torch.arange(30)[None]).logits.abs().max() <= 15
    windows = [plan.memory.window for plan in model.config.plans()]
    assert windows == [129, 65, 129, 65, 129, 65]


def test_target_layers():
    def targets(**flags):
        return nanochat.target_layers({**SIZES, **flags})

    assert targets() == LAST_THIRD
    assert targets(on_every_layer=True) == list(range(6))
    assert targets(on_second_half_layers=True) == [3, 4, 5]
    assert targets(on_last_two_thirds_layers=True) == [2, 3, 4, 5]
    assert targets(on_every_two_layers=True) == [1, 3, 5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": "6"}, "n_layer must be of type int"),
        ({"sequence_len": None}, "sequence_len must be of type int"),
        ({"v_from_x0": "false"}, "v_from_x0 must be of type int"),
        ({"add_init_res": True}, "add_init_res is on"),
        ({"add_init_qkv_shared": True}, "add_init_qkv_shared is on"),
        ({"v_exclude_self": True}, "v_exclude_self is on"),
        ({"detach_init_value": True}, "detach_init_value is on"),
        ({"v_from_x0": True, "v_from_v1": True}, "more than one source"),
        ({"on_every_layer": True, "on_second_half_layers": True}, "more than one of"),
        ({"learn_init_scaling_vec": True, "v_from_x0": True}, "without v_from_v1"),
        ({"window_pattern": "SX"}, "window_pattern"),
        ({"rope": 1}, "unknown settings in the configuration: rope"),
        ({"n_layer": 7}, "lacks transformer.h.6"),
        ({"n_layer": 5}, "unknown to its configuration, transformer.h.5"),
        ({"n_kv_head": 2}, "must hold"),
    ],
)
def test_what_does_not_fit_is_named(fields, message, tmp_path, capsys):
    write(tmp_path / "theirs", {**SIZES, **fields}, their_tensors(SIZES))
    with pytest.raises(SystemExit) as stop:
        main(["import", "nanochat", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_steps(tmp_path):
    tensors = their_tensors(SIZES)
    for step in (3, 20):
        changed = {**tensors, "smear_lambda": torch.tensor([float(step)])}
        write(tmp_path / "theirs", SIZES, changed, step)
    last = import_nanochat(tmp_path / "theirs", tmp_path / "last")
    assert last.tensors["model.stem.mix"] == 20
    third = import_nanochat(tmp_path / "theirs", tmp_path / "third", 3)
    assert third.tensors["model.stem.mix"] == 3
    with pytest.raises(ValueError, match=r"no step 4; there are 3, 20"):
        import_nanochat(tmp_path / "theirs", tmp_path / "fourth", 4)
    with pytest.raises(ValueError, match=r"holds no model_STEP\.pt"):
        import_nanochat(tmp_path / "last", tmp_path / "fifth")
    with pytest.raises(SystemExit) as stop:
        main(["import", "kvm-paper", str(tmp_path), str(tmp_path / "sixth"), "--step", "3"])
    assert stop.value.code == 2


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL_FOLDER"],)


def test_no_code_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL_FOLDER", str(tmp_path / "evil"))
    write(tmp_path / "theirs", SIZES, {})
    path = tmp_path / "theirs" / "model_000007.pt"
    path.write_bytes(pickle.dumps({"smear_lambda": Evil()}))
    with pytest.raises(ValueError, match="as plain tensors"):
        import_nanochat(tmp_path / "theirs", tmp_path / "ours")
    torch.save({"smear_lambda": Evil()}, path)
    with pytest.raises(ValueError, match="as plain tensors"):
        import_nanochat(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "evil").exists()
    torch.save([torch.ones(1)], path)
    with pytest.raises(ValueError, match="other than named tensors"):
        import_nanochat(tmp_path / "theirs", tmp_path / "ours")


def test_other_model_types_are_refused(tmp_path):
    write(tmp_path / "theirs", SIZES, {}, model_type="gpt_attn_res")
    with pytest.raises(ValueError, match="gpt_attn_res"):
        import_nanochat(tmp_path / "theirs", tmp_path / "ours")


def test_weights_that_share_memory_are_read(tmp_path):
    tensors = their_tensors(SIZES)
    tied = tensors["transformer.wte.weight"]
    write(tmp_path / "theirs", SIZES, {**tensors, "lm_head.weight": tied})
    import_nanochat(tmp_path / "theirs", tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(model.lm_head.weight, model.model.embedding.weight)


def test_a_weight_that_is_a_number_does_not_fit(tmp_path):
    tensors = {**their_tensors(SIZES), "transformer.wte.weight": torch.tensor(1.0)}
    write(tmp_path / "theirs", SIZES, tensors)
    with pytest.raises(ValueError, match="shape") as caught:
        import_nanochat(tmp_path / "theirs", tmp_path / "ours")
    assert "\n" not in str(caught.value)
