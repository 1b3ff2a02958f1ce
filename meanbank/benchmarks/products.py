"""The matrix products of a pass by themselves: the least time that the pass could take."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meanbank.benchmarks.timing import Arm

aten = torch.ops.aten
# Operators that are one product, and the place of its left factor among their arguments.
PLAIN = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten.addmm_: 1, aten.baddbmm_: 1}
# PyTorch's attention on a CPU: the places of its query and of `is_causal`, and how many products it
# is of each kind, scores and sums of values; backward these are the gradients of both factors.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 4, 1),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 7, 2),
}
QUERY_BLOCK = 256  # queries of causal attention that see the same keys


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor as it lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Random numbers that lie so."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return torch.randn(last + 1).to(self.dtype).as_strided(self.shape, self.stride)


@dataclasses.dataclass(frozen=True)
class Product:
    """Of two matrices, or of two batches of them."""

    left: Factor
    right: Factor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    @property
    def flops(self) -> int:
        """Two a multiplication."""
        return 2 * math.prod(self.shape) * self.left.shape[-1]


class Recorder(TorchDispatchMode):
    """Within it, `products` are those that run, in order, of backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = func.overloadpacket
        if kind in PLAIN:
            left, right = args[PLAIN[kind] : PLAIN[kind] + 2]
            self.products.append(Product(_factor(left), _factor(right)))
        elif kind in ATTENTION:
            at, causal, each = ATTENTION[kind]
            masked = len(args) > causal and args[causal]
            self.products += each * attention_products(*args[at : at + 3], causal=masked)
        return func(*args, **(kwargs or {}))


def products_of(run: Callable[[], Any]) -> list[Product]:
    """The products that a call runs."""
    with Recorder() as recorder:
        run()
    return recorder.products


def attention_products(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> list[Product]:
    """Scores and sums of values: query (B, H, T, Dk), key and value (B, Hkv, S, D).

    Causal ones block by block of queries, each with the keys up to its last query.
    """
    batch, heads, length, width = query.shape
    count, total = batch * heads, key.shape[2]
    found = []
    for start in range(0, length, QUERY_BLOCK):
        rows = min(QUERY_BLOCK, length - start)
        seen = min(total, start + rows) if causal else total
        turned = Factor((count, width, seen), (width * seen, 1, width), key.dtype)
        found.append(Product(_dense(query, count, rows, width), turned))
        weights = _dense(value, count, rows, seen)
        found.append(Product(weights, _dense(value, count, seen, value.shape[3])))
    return found


def products_arm(products: list[Product]) -> Arm:
    """All of them, one after the other, into memory that is there; equal factors are shared."""
    factors: dict[tuple[Factor, str], Tensor] = {}
    results: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
    calls = []
    for product in products:
        for factor, side in ((product.left, "left"), (product.right, "right")):
            if (factor, side) not in factors:
                factors[factor, side] = factor.tensor()
        key = (product.shape, product.left.dtype)
        if key not in results:
            results[key] = torch.empty(product.shape, dtype=product.left.dtype)
        pair = factors[product.left, "left"], factors[product.right, "right"]
        calls.append((torch.mm if len(product.shape) == 2 else torch.bmm, *pair, results[key]))

    @torch.no_grad()
    def run(_: Any) -> None:
        for multiply, left, right, result in calls:
            multiply(left, right, out=result)

    return Arm(run=run)


def _factor(tensor: Tensor) -> Factor:
    return Factor(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _dense(like: Tensor, count: int, rows: int, columns: int) -> Factor:
    return Factor((count, rows, columns), (rows * columns, columns, 1), like.dtype)
