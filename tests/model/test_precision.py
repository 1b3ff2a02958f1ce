"""Extreme activations and half precision, for every memory."""

import pytest
import torch
from torch import nn

from meanbank import MeanbankForCausalLM
from meanbank.core.layout import Layout
from meanbank.core.values import DenseValues
from meanbank.model.attention import attend
from tests.conformance.models import BACKBONES, MEMORIES, make_model
from tests.model.hf_models import random_ids

# Which outputs are multiplied by 1e4. Not all linear maps of a layer at once: the bonus of RWKV-7
# multiplies receptance, key, value, gate and output, and 1e20 squared is beyond fp32.
EXTREME = {
    "embeddings": lambda name, module: isinstance(module, nn.Embedding),
    "norms": lambda name, module: "norm" in name,
    "branches": lambda name, module: name.endswith((".attention", ".mlp")),
    "keys": lambda name, module: name.endswith((".query", ".key", ".receptance")),
    "values": lambda name, module: name.endswith(".projection"),
    "mlp": lambda name, module: name.endswith((".up", ".down")) and ".mlp." in name,
}


def larger(module, inputs, output):
    if isinstance(output, tuple):
        return output[0] * 1e4, *output[1:]
    return output * 1e4


def decoded(model, ids):
    """Logits of a prompt and of the tokens after it, one by one."""
    with torch.inference_mode():
        output = model(ids[:, :-5])
        logits = [output.logits]
        for at in range(ids.shape[1] - 5, ids.shape[1]):
            logits.append(model(ids[:, at : at + 1], cache=output.cache).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_extreme_activations_stay_finite(memory, dtype):
    for backbone in BACKBONES:
        model = make_model(memory, "projection", "grouped", dtype, layers=2, backbone=backbone)
        with torch.no_grad():
            model.model.embedding.weight[3] *= 1e4
        ids = random_ids(2, 23)
        for part, chosen in EXTREME.items():
            modules = [module for name, module in model.named_modules() if chosen(name, module)]
            hooks = [module.register_forward_hook(larger) for module in modules]
            assert torch.isfinite(decoded(model, ids)).all(), (part, backbone)
            for hook in hooks:
                hook.remove()


@pytest.mark.parametrize("memory", MEMORIES)
def test_extreme_tables_stay_finite(memory):
    model = make_model(memory, "bank", "grouped", torch.float32, layers=2)
    with torch.no_grad():
        model.model.layers[1].attention.values.table *= 1e4
    assert torch.isfinite(decoded(model, random_ids(2, 23))).all()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_generates(memory, dtype, tmp_path):
    """fp16 ends at 65,504: what grows beyond that is infinite, and then not a number."""
    make_model(memory, "bank", "grouped", torch.float32, layers=2).save_pretrained(tmp_path)
    model = MeanbankForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    ids = random_ids(2, 23)
    logits = decoded(model, ids)
    assert torch.isfinite(logits).all()
    text = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert text.shape == (2, 29)
    exact = MeanbankForCausalLM.from_pretrained(tmp_path)
    error = (logits.float() - decoded(exact, ids)).abs().max()
    assert error < (0.5 if dtype == torch.bfloat16 else 0.1), error


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_padded_batches_under_autocast(memory, backbone):
    """Norms give fp32 there and products half precision, whatever the device makes of it."""
    model = make_model(memory, "projection", "grouped", torch.float32, layers=2, backbone=backbone)
    ids = random_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    exact = model(ids, attention_mask=mask).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids, attention_mask=mask).logits
    assert (found - exact)[mask.bool()].abs().max() < 0.5


@pytest.mark.parametrize("memory", ["full", "sliding_window", "block_window"])
def test_reads_in_another_precision_than_queries(memory):
    """As a GPU's autocast does it."""
    attention = make_model(memory, "projection", "heads", torch.float32).model.layers[0].attention
    query, key = torch.randn(2, 2, 4, 7, 8)
    values = DenseValues(torch.randn(2, 4, 7, 6))
    layout = Layout.ragged((0, 0), [[7], [2, 3]])
    inputs = (query, key, values, torch.randn(2, 7, 24), None, layout)
    wanted, _ = attend(attention.memory, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend(attention.memory, *inputs)
    assert (found - wanted).abs().max() < 0.1
    assert not found[1, :, 5:].any()


def test_rows_of_rwkv7_go_on_in_another_precision():
    """As rows alone do: the matrix becomes as precise as what is read with it."""
    model = make_model("rwkv7", "projection", "heads", torch.float32, layers=2)
    ids, mask = random_ids(2, 9), torch.ones(2, 9)
    cache = model(ids).cache
    mask[0, :4] = 0
    mask = torch.cat([torch.ones(2, 9), mask], dim=1)
    wanted = model(ids, attention_mask=mask, cache=cache.select([0, 1])).logits
    found = model.double()(ids, attention_mask=mask, cache=cache).logits
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=1e-4)
