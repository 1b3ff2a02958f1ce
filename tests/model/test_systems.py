"""Each system of the papers in a Hugging Face life: generate, beams, save, reorder, refuse."""

import pytest
import torch

from tests.conformance.models import BACKBONES, make_model

SYSTEMS = [
    ("kvm_power_law", "bank"),
    ("ovq", "mixed_bank"),
    ("rwkv7", "projection_gated"),
    ("full", "bank_shared"),
    ("sliding_window", "first_layer"),
]


@pytest.mark.parametrize(("memory", "source"), SYSTEMS)
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}])
def test_generate_equals_decoding_without_cache(memory, source, backbone, settings):
    model = make_model(memory, source, "grouped", torch.float64, backbone=backbone)
    prompt = torch.randint(1, 40, (2, 9))
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **settings}
    fast = model.generate(prompt, **settings)
    assert torch.equal(fast, model.generate(prompt, **settings, use_cache=False))


@pytest.mark.parametrize(("memory", "source"), SYSTEMS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_caches_are_selected_and_repeated_whole(memory, source, backbone):
    model = make_model(memory, source, "grouped", torch.float64, backbone=backbone)
    ids = torch.randint(40, (3, 19))
    with torch.inference_mode():
        cache = model(ids[:, :14], use_cache=True).cache
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([2, 2, 0, 0])
        logits = model(ids[rows, 14:], cache=cache).logits
        whole = model(ids, use_cache=False).logits
    assert (logits - whole[rows, 14:]).abs().max() <= 1e-10


def test_a_shared_table_is_stored_once_and_loaded(tmp_path):
    model = make_model("full", "bank_shared", "grouped", torch.float32)
    names = [name for name, _ in model.named_parameters() if "table" in name]
    assert names == ["model.shared_table"]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.model.shared_table, model.model.shared_table)


@pytest.mark.parametrize("source", ["bank_shared", "mixed_bank", "gated_additive"])
def test_embeddings_alone_do_not_do_for_a_table(source):
    model = make_model("full", source, "grouped", torch.float32)
    with pytest.raises(ValueError, match="give input_ids"):
        model(inputs_embeds=torch.randn(1, 5, 24))
