"""Tensors that the arms work on, and the calls of the operators."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.benchmarks.settings import BUDGETS, SEED, Sizes
from meanbank.ops.kvm import KVMMemory, kvm_attention


@dataclasses.dataclass(frozen=True)
class Operands:
    """query, key, value (B, H, T, D), merge gate (B, H, T) and the memory's norm (D,) twice."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    norm_weight: Tensor
    norm_bias: Tensor

    @classmethod
    def random(
        cls, sizes: Sizes, length: int, dtype: torch.dtype, device: str, seed: int = SEED
    ) -> "Operands":
        """Normal numbers, gates between 0.5 and 1.5, always the same."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (sizes.batch, sizes.heads, length, sizes.head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        query, key, value = (normal(*shape).to(dtype) for _ in range(3))
        gate = 0.5 + torch.rand(shape[:3], generator=generator, device=device)
        weight, bias = 1 + 0.1 * normal(sizes.head_dim), 0.1 * normal(sizes.head_dim)
        return cls(query, key, value, gate, weight, bias)

    def part(self, start: int, stop: int) -> "Operands":
        """The tokens [start, stop), as views."""
        names = ("query", "key", "value", "gate")
        return dataclasses.replace(self, **{n: getattr(self, n)[:, :, start:stop] for n in names})

    def tokens(self, start: int, stop: int) -> "list[Operands]":
        """The tokens [start, stop) one by one, contiguous as a model hands them over."""
        single = (self.part(at, at + 1) for at in range(start, stop))
        names = ("query", "key", "value", "gate")
        return [
            dataclasses.replace(one, **{n: getattr(one, n).contiguous() for n in names})
            for one in single
        ]

    def leaves(self) -> "Operands":
        """The same tensors as leaves that gradients are wanted of."""
        return Operands(*(tensor.detach().requires_grad_() for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in field order."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def kvm(
    operands: Operands, sizes: Sizes, budget: str, backend: str, memory: KVMMemory | None = None
) -> tuple[Tensor, KVMMemory]:
    """`kvm_attention` through its public interface: output (B, H, T, D) and the memory after."""
    result = kvm_attention(
        operands.query,
        operands.key,
        operands.value,
        operands.gate,
        norm_weight=operands.norm_weight,
        norm_bias=operands.norm_bias,
        rotary_dim=sizes.rotary_dim,
        chunk_size=sizes.chunk_size,
        budget=BUDGETS[budget],
        memory=memory,
        return_memory=True,
        backend=backend,
    )
    assert isinstance(result, tuple)
    return result


def sdpa(operands: Operands) -> Tensor:
    """PyTorch's own causal attention over all tokens; FlashAttention on a GPU in half precision."""
    with flash(operands.query):
        return F.scaled_dot_product_attention(
            operands.query, operands.key, operands.value, is_causal=True
        )


@contextlib.contextmanager
def flash(query: Tensor) -> Iterator[None]:
    """Nothing but FlashAttention (split over keys and values in decode), where it can be."""
    if query.device.type != "cuda" or query.dtype == torch.float32:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
