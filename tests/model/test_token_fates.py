"""What became of tokens, against provenance and by hand."""

import pytest
import torch

from meanbank.model.token_fates import FATES, read_fates
from tests.conformance.models import KVM, MEMORIES, make_model

PLAN = [
    {"memory": {**KVM, "sink": 2}},
    {"where": [1], "memory": "rwkv7"},
    {"where": [2], "memory": MEMORIES["ovq"]},
    {"where": [3], "memory": "full"},
]


def test_fates_are_those_of_the_cache():
    model = make_model("full", "projection", "heads", torch.float32, layers=4, plan=PLAN)
    ids = torch.randint(40, (30,)).tolist()
    description, layers = read_fates(model, ids)
    assert [told.layer for told in layers] == [0, 2]
    for told in layers:
        described = description.layers[told.layer]
        assert told.heads == (0, 1, 2, 3)
        assert told.rows.shape == told.fates.shape == (4, 30)
        for rows, fates in zip(told.rows, told.fates, strict=True):
            words = [FATES[fate] for fate in fates]
            opened = words.count("own row") + words.count("sink")
            assert opened == described.rows[0]
            assert words.count("merged") == described.merged[0]
            assert words.count("window") == described.exact[0]
            assert words[:2] == (["sink"] * 2 if told.memory == "kvm" else ["own row", words[1]])
            assert words.count("sink") == (2 if told.memory == "kvm" else 0)
            assert (rows[30 - described.exact[0] :] == -1).all()
            assert sorted(set(rows.tolist())) == list(range(-1, described.rows[0]))
    assert [told.layer for told in read_fates(model, ids, layer=2)[1]] == [2]
    (one,) = read_fates(model, ids, layer=0, head=1)[1]
    assert one.heads == (1,)
    assert (one.rows == layers[0].rows[1:2]).all()


def test_nothing_to_tell():
    model = make_model("full", "projection", "heads", torch.float32, layers=4, plan=PLAN)
    ids = list(range(30))
    for layer, words in ((1, "rwkv7"), (3, "full")):
        with pytest.raises(ValueError, match=f"layer {layer} has no compressed rows .*: {words}"):
            read_fates(model, ids, layer=layer)
    with pytest.raises(ValueError, match="there is no layer 4: the model has 4"):
        read_fates(model, ids, layer=4)
    with pytest.raises(ValueError, match="there is no key/value head 4: the model has 4"):
        read_fates(model, ids, head=4)
    with pytest.raises(ValueError, match="all 3 tokens are still in the exact window"):
        read_fates(model, ids[:3])
    with pytest.raises(ValueError, match="the text is empty"):
        read_fates(model, [])
    plain = make_model("full", "projection", "grouped", torch.float32, layers=2)
    with pytest.raises(ValueError, match="no layer has compressed rows to tell of; memory: full"):
        read_fates(plain, ids)
