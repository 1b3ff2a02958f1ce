"""PyTorch's default device is the user's business: a model and its inputs say where they are."""

import pytest
import torch

from meanbank import MeanbankCache
from meanbank.ops import rotary
from tests.conformance.models import MEMORIES, make_model
from tests.model.hf_models import left_padded


@torch.inference_mode()
def everything(model, path) -> list[torch.Tensor]:
    """A padded prompt, documents, decoding, forgetting, selecting, joining, files."""
    with torch.device("cpu"):
        ids, mask = left_padded([torch.arange(1, 12), torch.arange(5, 12)])
        documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])
    cache = model.model.new_cache()
    cache.activate_past_recording(3)
    logits = [model(ids, attention_mask=mask, cache=cache).logits]
    logits.append(model(ids[:, :4].clamp(min=1), document_ids=documents, cache=cache).logits)
    token = ids[:, -1:]
    for _ in range(3):
        logits.append(model(token, cache=cache).logits)
    cache.crop(-1)
    cache = MeanbankCache.join([cache.select([1]), cache.select([0]).repeat(2)])
    cache.save(path, model, overwrite=True)
    cache = MeanbankCache.load(path, model)
    logits.append(model(token[[0, 0, 1]], cache=cache).logits)
    return logits


@pytest.mark.parametrize(
    ("memory", "backbone"), [*((memory, "gptalpha2") for memory in MEMORIES), ("full", "nanochat")]
)
def test_nothing_is_made_on_the_default_device(memory, backbone, tmp_path):
    model = make_model(memory, "bank", "grouped", torch.float32, layers=2, backbone=backbone)
    rotary._kept_frequencies.cache_clear()
    with torch.device("meta"):  # what is made there has no numbers
        found = everything(model, tmp_path / "context")
    wanted = everything(model, tmp_path / "context")
    assert all(map(torch.equal, found, wanted))
