"""Reading a prompt piece by piece: what one pass gives, with activations of one piece."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.models import MEMORIES, make_model

READERS = ["full", "kvm_power_law", "kvm_three_chunks", "ovq", "rwkv7", "sliding_window_sink"]


def tensors(cache):
    return [tensor for layer in cache.layers for tensor in layer.state.tensors()]


def assert_same(found, wanted):
    assert (found.logits - wanted.logits[:, -1:]).abs().max() <= 1e-10
    assert (found.cache.seen, found.cache.lengths) == (wanted.cache.seen, wanted.cache.lengths)
    assert found.cache.documents == wanted.cache.documents
    for row in (row for row, length in enumerate(wanted.cache.lengths) if length):
        alone, other = (output.cache.select([row]) for output in (found, wanted))
        for ours, theirs in zip(tensors(alone), tensors(other), strict=True):
            assert ours.shape == theirs.shape
            assert not ours.numel() or (ours - theirs).abs().max() <= 1e-10


@st.composite
def prompts(draw):
    """A mask with padding anywhere, document ids, tokens read before, and the size of a piece."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 22))
    bits = draw(st.lists(st.integers(0, 3), min_size=rows * columns, max_size=rows * columns))
    mask = torch.tensor(bits).view(rows, columns) > 0
    ids = draw(st.lists(st.integers(0, 5), min_size=columns, max_size=columns))
    documents = torch.tensor(ids).eq(0).cumsum(0).expand(rows, columns)
    return (
        mask.long() if draw(st.booleans()) else None,
        documents if draw(st.booleans()) else None,
        (rows, columns),
        draw(st.integers(0, 9)),
        draw(st.integers(1, 25)),
    )


@pytest.mark.parametrize("memory", READERS)
@settings(max_examples=12)
@given(prompt=prompts())
def test_any_piece(memory, prompt):
    mask, documents, shape, before, piece = prompt
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    ids = torch.randint(40, shape)
    caches = [model.model.new_cache() for _ in range(2)]
    if before:
        first = torch.randint(40, (shape[0], before))
        for cache in caches:
            model(first, cache=cache)
    arguments = {"attention_mask": mask, "document_ids": documents}
    with torch.inference_mode():
        wanted = model(ids, cache=caches[0], use_cache=True, **arguments)
    found = model.prefill(ids, cache=caches[1], prefill_chunk=piece, **arguments)
    assert_same(found, wanted)


@pytest.mark.parametrize("memory", MEMORIES)
def test_no_layer_sees_more_than_a_piece(memory):
    """Activations are those of a piece: in `prefill` and in `generate`."""
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    lengths = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    ids = torch.randint(40, (2, 31))
    model.prefill(ids, prefill_chunk=5)
    assert max(lengths) == 5
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    lengths.clear()
    found = model.generate(ids, max_new_tokens=6, do_sample=False, prefill_chunk_size=7)
    assert max(lengths) == 7
    assert torch.equal(found, wanted)


def test_generate_reads_a_long_prompt_in_pieces_once(monkeypatch):
    monkeypatch.setattr("meanbank.model.modeling.PREFILL_CHUNK", 6)
    model = make_model("kvm_power_law", "projection", "grouped", torch.float64, layers=2)
    ids, lengths = torch.randint(40, (1, 20)), []
    model.model.embedding.register_forward_pre_hook(lambda _, a: lengths.append(a[0].shape[1]))
    model.generate(ids, max_new_tokens=4, do_sample=False)
    assert lengths == [6, 6, 6, 2, 1, 1, 1]
    lengths.clear()
    model.generate(inputs_embeds=model.model.embedding.weight[None, :11], max_new_tokens=2)
    assert lengths == [1]


def test_bad_input_is_refused_before_anything_is_read():
    model = make_model("kvm_power_law", "bank", "grouped", torch.float32, layers=2)
    ids, cache = torch.randint(40, (2, 9)), model.model.new_cache()
    for arguments, words in (
        ({"prefill_chunk": 0}, "at least 1 token, got 0"),
        ({"attention_mask": torch.ones(2, 8)}, "attention_mask must have shape"),
        ({"document_ids": torch.ones(1, 9)}, "document_ids must have shape"),
    ):
        with pytest.raises(ValueError, match=words):
            model.prefill(ids, cache=cache, **arguments)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.prefill(torch.tensor([[1, 2, 3, 99]]), cache=cache, prefill_chunk=2)
    assert cache.lengths == ()
