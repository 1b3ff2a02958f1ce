"""The products of a pass by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meanbank.benchmarks.products import products_arm, products_of
from tests.conformance.models import make_model
from tests.counting import flop_counter


def shapes(products):
    return [(*product.left.shape, product.right.shape[-1]) for product in products]


def test_a_linear_map_is_three_products():
    linear, x = nn.Linear(5, 7), torch.randn(11, 5, requires_grad=True)

    def run():
        linear(x).sum().backward()

    products = products_of(run)
    forward, *backward = shapes(products)
    assert forward == (11, 5, 7)
    # of the gradients of the rows and of the weight, in whatever order and layout
    assert sorted(map(sorted, backward)) == [[5, 7, 11], [5, 7, 11]]
    assert all(product.flops == 2 * 11 * 5 * 7 for product in products)
    assert products[0].right.stride == (1, 5)  # the weight is read as it lies


def test_causal_attention_block_by_block():
    query, key = (torch.randn(2, 3, 600, 8, requires_grad=True) for _ in range(2))
    value = torch.randn(2, 3, 600, 8, requires_grad=True)

    def run():
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    products = products_of(run)
    blocks = [(256, 256), (256, 512), (88, 600)]
    once = [shape for rows, seen in blocks for shape in ((6, rows, 8, seen), (6, rows, seen, 8))]
    assert shapes(products) == 3 * once  # one each forward, two each backward
    with torch.no_grad():
        alone = products_of(
            lambda: F.scaled_dot_product_attention(query, key[:, :, :9], value[:, :, :9])
        )
    assert shapes(alone) == [
        shape for rows in (256, 256, 88) for shape in ((6, rows, 8, 9), (6, rows, 9, 8))
    ]


@pytest.mark.parametrize("memory", ["kvm_power_law", "block_window"])
def test_all_of_a_model_are_found(memory):
    model = make_model(memory, "bank", "grouped", torch.float32).train()
    ids = torch.randint(model.config.vocab_size, (2, 24))

    def run():
        model(ids, labels=ids, use_cache=False).loss.backward()

    run()
    with flop_counter() as counter:
        run()
    products = products_of(run)
    assert sum(product.flops for product in products) == counter.get_total_flops()


def test_they_are_run_as_they_lie(monkeypatch):
    linear, x = nn.Linear(5, 7, bias=False), torch.randn(2, 11, 5)
    products = products_of(lambda: (linear(x), x @ x.mT, linear(x)))
    called = []
    for name in ("mm", "bmm"):
        plain = getattr(torch, name)

        def multiply(left, right, *, out, name=name, plain=plain):
            called.append((name, left.stride(), right.stride(), id(out)))
            return plain(left, right, out=out)

        monkeypatch.setattr(torch, name, multiply)
    arm = products_arm(products)
    arm.run(None)
    assert [line[:3] for line in called] == [
        ("mm", (5, 1), (1, 5)),
        ("bmm", (55, 5, 1), (55, 1, 5)),
        ("mm", (5, 1), (1, 5)),
    ]
    assert called[0][3] == called[2][3]
