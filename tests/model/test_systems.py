"""Each system of the papers in a Hugging Face life: generate, beams, save, reorder, refuse."""

import pytest
import torch

from meanbank import MeanbankConfig, MeanbankForCausalLM
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


def test_a_cache_of_another_model_is_refused():
    """Also where the number of layers and all sizes agree."""
    ids = torch.randint(40, (1, 9))
    models = [
        make_model(memory, source, "heads", torch.float32, backbone=backbone)
        for memory, source, backbone in (
            ("full", "projection", "gptalpha2"),
            ("full", "bank", "gptalpha2"),
            ("kvm_power_law", "projection", "gptalpha2"),
            ("rwkv7", "projection", "gptalpha2"),
            ("full", "projection", "nanochat"),
        )
    ]
    for model in models:
        for other in models:
            if other is not model:
                cache = model(ids, use_cache=True).cache
                with pytest.raises(ValueError, match=r"the cache (was made|has)"):
                    other(ids, cache=cache)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [(torch.zeros(9, 24), "must be"), (torch.zeros(1, 9, 23), "must be")],
)
def test_embeddings_of_another_shape_are_refused(embeddings, message):
    model = make_model("full", "projection", "heads", torch.float32)
    with pytest.raises(ValueError, match=message):
        model(inputs_embeds=embeddings)
    wider = torch.randn(1, 5, 24, dtype=torch.float64)
    assert model(inputs_embeds=wider).logits.dtype == torch.float32


def test_a_cache_never_holds_the_callers_ids():
    """int32 ids are what a bank's state stores; the caller may write over them afterwards."""
    model = make_model("full", "bank", "heads", torch.float64)
    ids = torch.randint(40, (1, 9), dtype=torch.int32)
    more, kept = torch.randint(40, (1, 3)), ids.clone()
    cache = model(ids, use_cache=True).cache
    ids.fill_(0)
    after = model(more, cache=cache).logits
    whole = model(torch.cat([kept.long(), more], dim=1)).logits
    assert (after - whole[:, 9:]).abs().max() <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_time_mix_takes_a_zero_row_in_half_precision(dtype):
    """A norm of zero has no direction; in fp16 even the smallest epsilon is zero."""
    model = make_model("rwkv7", "projection", "heads", dtype, backbone="nanochat")
    with torch.no_grad():
        model.model.embedding.weight[0] = 0
    logits = model(torch.zeros(1, 6, dtype=torch.long)).logits
    assert torch.isfinite(logits).all()


def test_a_bank_under_the_time_mix_starts_from_an_orthogonal_projection():
    torch.manual_seed(0)
    config = MeanbankConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        plan=[{"memory": "rwkv7"}, {"where": [1], "values": "bank"}],
    )
    model = MeanbankForCausalLM(config)
    block = model.model.layers[1]
    inputs = block.attention_norm(model.model.stem.alone(model.model.embedding.weight))
    # an orthogonal map keeps lengths
    lengths = block.attention.values.table.norm(dim=1) / inputs.norm(dim=1)
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-4)


@pytest.mark.parametrize("source", ["bank_shared", "mixed_bank", "gated_additive"])
def test_embeddings_alone_do_not_do_for_a_table(source):
    model = make_model("full", source, "grouped", torch.float32)
    with pytest.raises(ValueError, match="give input_ids"):
        model(inputs_embeds=torch.randn(1, 5, 24))
