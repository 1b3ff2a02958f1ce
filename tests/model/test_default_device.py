"""PyTorch's default device is the user's business: a model and its inputs say where they are."""

import pytest
import torch

from meanbank import MeanbankCache
from meanbank.data import RecallConfig, train_tokenizer
from meanbank.evaluation import (
    BitsPerByte,
    Mqar,
    Parts,
    PositionLoss,
    PositionProbe,
    Recall,
    Ruler,
    Serving,
    TextSample,
    run_evaluation,
)
from meanbank.evaluation.continuations import Continuation, judge
from meanbank.ops import rotary
from tests.conformance.models import MEMORIES, make_model
from tests.evaluation.test_evaluations import make_model as small_model
from tests.evaluation.test_evaluations import packed, subject
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


EVALUATIONS = [
    BitsPerByte(sequence_length=8),
    PositionLoss(multiple=2),
    PositionProbe(sequence_length=30),
    Parts(max_tokens=16, sequence_length=8),
    Recall(grid=((16, 2),), sequences=2),
    Mqar(grid=((16, 2),), sequences=2),
    Ruler(tasks=("niah_single_1",), lengths=(700,), count=1),
    TextSample(prompts=("a",), max_new_tokens=2),
]


@pytest.mark.parametrize("evaluation", EVALUATIONS, ids=lambda each: each.tag)
def test_evaluations_make_nothing_there_either(evaluation):
    tokenizer = train_tokenizer(["a"], 257)
    model = small_model(vocab_size=400)
    text = packed(*[[1 + (7 * i + j) % 200 for j in range(40)] for i in range(4)])
    of = subject(
        model, text, sizes=[1] * 400, training_length=16, tokenizer=tokenizer,
        recall=RecallConfig() if evaluation.tag in ("recall", "mqar") else None,
    )  # fmt: skip
    with torch.device("meta"):
        found = run_evaluation(evaluation, of)
    assert found.records == run_evaluation(evaluation, of).records


def test_continuations_and_speed_make_nothing_there_either():
    model = small_model()
    rows = [Continuation(ids=(1, 2, 3, 4), start=2), Continuation(ids=(5, 6), start=1)]
    with torch.device("meta"):
        found = judge(model, rows, batch_size=2)
        run_evaluation(Serving(contexts=(8,), tokens=1), subject(model))
    assert found == judge(model, rows, batch_size=2)
