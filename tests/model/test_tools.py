"""Tools around transformers: its pipeline, accelerate's device maps, the lm-evaluation-harness."""

import sys

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, pipeline

from meanbank import MeanbankForCausalLM
from meanbank.data.tokenizer import END_OF_TEXT, train_tokenizer
from meanbank.evaluation import harness
from tests.conformance.models import make_model

PROMPTS = ["the memory keeps", "a mean of keys and values in the memory", "mean", "keys and"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model and tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["the memory keeps a mean of keys and values " * 5] * 20, 300)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
    )
    model = make_model(
        "kvm_power_law",
        "bank",
        "grouped",
        torch.float32,
        layers=2,
        vocab_size=len(wrapped),
        eos_token_id=0,
        pad_token_id=0,
    )
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
    return path


def test_pipeline(folder):
    generator = pipeline("text-generation", model=str(folder))
    options = {"max_new_tokens": 12, "do_sample": False}
    single = [generator(prompt, **options)[0]["generated_text"] for prompt in PROMPTS]
    assert all(map(str.startswith, single, PROMPTS))
    batches = generator(PROMPTS, batch_size=3, **options)
    assert [result[0]["generated_text"] for result in batches] == single
    several = generator("the", do_sample=True, num_return_sequences=2, max_new_tokens=3)
    assert len(several) == 2
    model, tokenizer = generator.model, AutoTokenizer.from_pretrained(folder)
    again = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert again(PROMPTS[0], **options)[0]["generated_text"] == single[0]
    assert model(**tokenizer("the memory", return_tensors="pt")).logits.ndim == 3


def test_device_maps(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = make_model("kvm_power_law", "bank", "grouped", torch.float32)
    model.save_pretrained(tmp_path)
    ids = torch.randint(40, (2, 13))
    for device_map in ("auto", {"": "cpu"}):
        placed = MeanbankForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert torch.allclose(placed(ids).logits, model(ids).logits, atol=1e-5)
    blocks = {f"model.layers.{layer}": "cpu" for layer in range(3)}
    rest = dict.fromkeys(["model.embedding", "model.stem", "model.norm", "lm_head"], "cpu")
    with pytest.raises(ValueError, match="not offload them"):
        MeanbankForCausalLM.from_pretrained(
            tmp_path,
            device_map={**rest, **blocks, "model.layers.1": "disk"},
            offload_folder=tmp_path / "offloaded",
        )
    with accelerate.init_empty_weights():
        empty = MeanbankForCausalLM(model.config)
    memory = {"cpu": 40_000, "disk": 10**9}
    found = accelerate.infer_auto_device_map(
        empty, memory, no_split_module_classes=list(empty._no_split_modules)
    )
    assert all(name.count(".") <= 2 for name in found), found  # no block in parts


def test_the_harness_scores_the_same_at_any_batch_size(folder):
    models = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    pairs = [(prompt, end) for prompt in PROMPTS for end in (" keeps a mean", " and", " values")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MeanbankForCausalLM.from_pretrained(folder)
    scores, texts = [], []
    for batch_size in (1, 8):
        tool = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        asked = [
            instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number)
            for number, pair in enumerate(pairs)
        ]
        scores.append(tool.loglikelihood(asked))
        asked = [
            instance(
                request_type="generate_until",
                doc={},
                arguments=(prompt, {"until": ["\n\n"], "max_gen_toks": 6}),
                idx=number,
            )
            for number, prompt in enumerate(PROMPTS)
        ]
        texts.append(tool.generate_until(asked))
    for (one, greedy), (other, also) in zip(*scores, strict=True):
        assert abs(one - other) < 1e-4
        assert greedy == also
    assert texts[0] == texts[1]


def test_the_harness_is_asked_for_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert harness.main() == 2
    assert "pip install 'meanbank[eval]'" in capsys.readouterr().err
