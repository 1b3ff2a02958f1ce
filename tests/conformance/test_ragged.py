"""Rows of any lengths, any padding and packed documents: each is read as if alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.models import BACKBONES, MEMORIES, make_model

SOURCES = ["projection", "bank", "first_layer", "mixed_bank"]
TOLERANCE = 1e-10  # fp64


def alone(model, ids):
    """Logits of one sequence (T,) read by itself, (T, vocabulary)."""
    return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("memory", "source", "backbone"), list(itertools.product(MEMORIES, SOURCES, BACKBONES))
)
def test_padding_and_documents(memory, source, backbone):
    model = make_model(memory, source, "grouped", torch.float64, layers=2, backbone=backbone)
    mask = torch.zeros(4, 27, dtype=torch.long)
    mask[0], mask[1, -5:], mask[3, 4:20] = 1, 1, 1  # full, left, nothing, both sides
    parts = [mask, torch.ones(4, 9, dtype=torch.long), torch.ones(4, 1, dtype=torch.long)]
    parts[1][0, 3], parts[1][3, :2] = 0, 0
    ids = torch.randint(40, (4, 37))
    check_padding(model, ids, parts)
    documents = [[9, 18], [27], [1, 4, 22], [13, 13, 1]]
    check_documents(model, ids[:, :27], documents, ids[:, 27:])


def check_padding(model, ids, parts):
    cache, logits, columns = None, [], 0
    with torch.inference_mode():
        for number, part in enumerate(parts):
            whole = torch.cat(parts[: number + 1], dim=1)
            new = ids[:, columns : columns + part.shape[1]]
            output = model(new, attention_mask=whole, cache=cache, use_cache=True)
            cache, columns = output.cache, columns + part.shape[1]
            logits.append(output.logits)
        valid, logits = torch.cat(parts, dim=1).bool(), torch.cat(logits, dim=1)
        for row in range(len(ids)):
            if valid[row].any():
                wanted = alone(model, ids[row, :columns][valid[row]])
                assert (logits[row][valid[row]] - wanted).abs().max() <= TOLERANCE
    assert cache.lengths == tuple(valid.sum(dim=1).tolist())
    assert cache.seen == columns


def check_documents(model, ids, documents, more):
    """documents: their lengths, row by row; more: what then follows each row's last one."""
    numbers = [[i for i, n in enumerate(row) for _ in range(n)] for row in documents]
    document_ids = torch.tensor(numbers)
    with torch.inference_mode():
        output = model(ids, document_ids=document_ids, use_cache=True)
        after = model(more, cache=output.cache).logits
        for row, lengths in enumerate(documents):
            pieces = ids[row].split(lengths)
            wanted = torch.cat([alone(model, piece) for piece in pieces])
            assert (output.logits[row] - wanted).abs().max() <= TOLERANCE
            last = alone(model, torch.cat([pieces[-1], more[row]]))[-more.shape[1] :]
            assert (after[row] - last).abs().max() <= TOLERANCE


@st.composite
def calls(draw):
    """A few masks (rows, columns) of zeros and ones, one a call."""
    rows = draw(st.integers(1, 4))
    shape = st.integers(1, 14)
    masks = []
    for _ in range(draw(st.integers(1, 4))):
        columns = draw(shape)
        bits = draw(st.lists(st.integers(0, 3), min_size=rows * columns, max_size=rows * columns))
        masks.append((torch.tensor(bits).view(rows, columns) > 0).long())
    return masks


@pytest.mark.parametrize("memory", ["kvm_power_law", "kvm_three_chunks", "ovq", "rwkv7", "full"])
@settings(max_examples=15, deadline=None)
@given(parts=calls())
def test_any_padding_in_any_split(memory, parts):
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    ids = torch.randint(40, (len(parts[0]), sum(part.shape[1] for part in parts)))
    check_padding(model, ids, parts)


@pytest.mark.parametrize("memory", ["kvm_power_law", "ovq", "rwkv7", "sliding_window_sink"])
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_any_documents(memory, lengths):
    model = make_model(memory, "projection", "grouped", torch.float64, layers=2)
    longest = max(map(sum, lengths))
    lengths = [[*row[:-1], row[-1] + longest - sum(row)] for row in lengths]
    ids = torch.randint(40, (len(lengths), longest + 3))
    check_documents(model, ids[:, :longest], lengths, ids[:, longest:])


@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_of_packed_documents_are_those_of_each(memory):
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2).train()
    ids = torch.randint(40, (1, 31))
    lengths = [13, 17, 1]
    numbers = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    weights = torch.randn(31, 40, dtype=torch.float64)
    (model(ids, document_ids=numbers, use_cache=False).logits[0] * weights).sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pieces = zip(ids[0].split(lengths), weights.split(lengths), strict=True)
    sum((alone(model, piece) * w).sum() for piece, w in pieces).backward()
    for name, parameter in model.named_parameters():
        wanted = parameter.grad
        assert (packed[name] - wanted).abs().max() <= 1e-9 * max(1.0, wanted.abs().max()), name


@pytest.mark.parametrize("memory", ["kvm_power_law", "ovq", "rwkv7", "sliding_window"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generating_a_padded_batch(memory, beams):
    """Left padding, as `generate` wants it: each row's text is what it gets alone."""
    model = make_model(memory, "bank", "grouped", torch.float64, layers=2)
    prompts = [torch.randint(1, 40, (n,)) for n in (9, 2, 14)]
    ids = torch.zeros(3, 14, dtype=torch.long)
    mask = torch.zeros(3, 14, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 14 - len(prompt) :], mask[row, 14 - len(prompt) :] = prompt, 1
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        assert torch.equal(
            together[row, 14:], model.generate(prompt[None], **options)[0, len(prompt) :]
        )


def test_caches_of_ragged_batches_are_selected_and_repeated():
    model = make_model("kvm_power_law", "bank", "grouped", torch.float64)
    ids, mask = torch.randint(40, (3, 21)), torch.ones(3, 21, dtype=torch.long)
    mask[1, :10], mask[2, :4] = 0, 0
    with torch.inference_mode():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        cache.batch_select_indices(torch.tensor([2, 1]))
        cache.batch_repeat_interleave(2)
        assert cache.lengths == (17, 17, 11, 11)
        more = torch.randint(40, (4, 6))
        logits = model(more, cache=cache).logits
        for at, row in enumerate([2, 2, 1, 1]):
            wanted = alone(model, torch.cat([ids[row][mask[row].bool()], more[at]]))
            assert (logits[at] - wanted[-6:]).abs().max() <= TOLERANCE
