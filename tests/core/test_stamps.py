"""Stamps notice what weights go through while something that was derived from them is kept."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meanbank.core.derived import derived
from meanbank.core.stamps import Stamp


class Owner:
    pass


def in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight.mul_(2)


def of_an_alias(layer):
    layer.weight.detach()[0] = 2


def loaded(layer):
    layer.load_state_dict({"weight": torch.randn(8, 8)})


def assigned(layer):
    layer.load_state_dict({"weight": torch.randn(8, 8)}, assign=True)


def new_data(layer):
    layer.weight.data = torch.randn(8, 8)


def there_and_back(layer):
    layer.to(torch.bfloat16).to(torch.float32)


def step(kind, **settings):
    def change(layer):
        layer.weight.grad = torch.ones(8, 8)
        kind(layer.parameters(), lr=0.1, **settings).step()

    return change


WAYS = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "of an alias": of_an_alias,
    "loaded": loaded,
    "assigned": assigned,
    "new data": new_data,
    "there and back": there_and_back,
    "sgd": step(torch.optim.SGD),
    "fused sgd": step(torch.optim.SGD, fused=True),
    "fused adamw": step(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_weight_is_noticed(way):
    layer, owner = nn.Linear(8, 8, bias=False), Owner()

    def doubled():
        return derived(owner, "key", (layer.weight,), lambda: layer.weight * 2)

    for _ in range(3):
        with torch.no_grad():
            before = doubled()
            assert doubled() is before
            assert Stamp(layer.weight) == Stamp(layer.weight.detach())
        WAYS[way](layer)
        with torch.no_grad():
            assert torch.equal(doubled(), layer.weight * 2)


def test_another_tensor_at_the_same_address_is_another():
    seen, stamps = set(), []
    for _ in range(200):
        tensor = torch.empty(1024)
        seen.add(tensor.data_ptr())
        assert all(Stamp(tensor) != stamp for stamp in stamps)
        stamps.append(Stamp(tensor))
        del tensor
    assert len(seen) < 200


def test_stamps_hold_nothing_and_hinder_nothing():
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
    stamp, storage = Stamp(weight), StorageWeakRef(weight.untyped_storage())
    torch.utils.swap_tensors(weight, other)
    assert stamp == Stamp(other)
    assert stamp != Stamp(weight)
    del other
    assert storage.expired()


def test_a_copy_of_a_stamp_equals_nothing():
    weight = torch.ones(4)
    stamp = Stamp(weight)
    for other in (copy.copy(stamp), copy.deepcopy(stamp), pickle.loads(pickle.dumps(stamp))):
        assert other != stamp
        assert other != Stamp(weight)
