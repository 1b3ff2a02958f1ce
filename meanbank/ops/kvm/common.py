"""What the backends of Key-Value Means share: parameters, blocks of tokens, readouts, sums."""

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from meanbank.core.precision import accumulator_dtype
from meanbank.ops.kvm.memory import KVMMemory, KVMRows
from meanbank.ops.kvm.options import KVMOptions

NORM_EPSILON = 1e-5  # of LN_s
EPSILON = 1e-12  # below this norm a value sum has no direction


@dataclasses.dataclass(frozen=True)
class KVMWeights:
    """Parameters of the operator: LN_s (Dk,) twice, temperatures (H,) of memory and window keys."""

    norm_weight: Tensor
    norm_bias: Tensor
    state_temperature: Tensor
    window_temperature: Tensor

    def norm(self, key: Tensor) -> Tensor:
        """LN_s, the one layer norm that prepares, routes and reads keys."""
        weight, bias = self.norm_weight.to(key.dtype), self.norm_bias.to(key.dtype)
        return F.layer_norm(key, key.shape[-1:], weight, bias, eps=NORM_EPSILON)


Block = tuple[Tensor, Tensor, Tensor | None]  # key, value and gate of some consecutive tokens


def spans(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Positions [start, stop) cut at the multiples of `chunk`."""
    cuts = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return list(itertools.pairwise(cuts))


def join(blocks: list[Block]) -> Block:
    """Consecutive blocks as one."""
    key, value, gate = zip(*blocks, strict=True)
    whole_gate = None if gate[0] is None else torch.cat(gate, dim=2)
    return torch.cat(key, dim=2), torch.cat(value, dim=2), whole_gate


def resumed(
    memory: KVMMemory, key: Tensor, value: Tensor, gate: Tensor | None
) -> tuple[int, KVMRows | None, Block]:
    """Tokens seen, rows and window of a memory, in the precision of the tokens that follow it."""
    precise = accumulator_dtype(key.dtype)
    rows = memory.rows
    if rows is not None and rows.key.dtype != precise:
        rows = rows.map(lambda tensor: tensor.to(precise))
    assert memory.window_value is not None  # the api has checked
    held_gate = None if gate is None or memory.window_gate is None else memory.window_gate.to(gate)
    held = (memory.window_key.to(key.dtype), memory.window_value.to(value.dtype), held_gate)
    return memory.seen, rows, held


def readout(value: Tensor, scale: Tensor, options: KVMOptions) -> Tensor:
    """What rows contribute: the direction of a value sum at its radius, or a mean of writes.

    value (..., Dv) and scale (...) as in `KVMRows`.
    """
    if options.value_scale == "radius":
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        return value * (scale[..., None] / norm.clamp_min(EPSILON))
    return value / scale[..., None]


def rounding_noise(key_length: Tensor, row_length: Tensor) -> Tensor:
    """How far equal similarities may differ: (..., C) and (..., M) norms -> (..., 1)."""
    longest = key_length.amax(dim=-1, keepdim=True) * row_length.amax(dim=-1, keepdim=True)
    return 2 * torch.finfo(longest.dtype).eps * longest


def gather(x: Tensor, index: Tensor) -> Tensor:
    """x (..., C, D) at index (..., n) -> (..., n, D)."""
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def position_free(key: Tensor, rotary_dim: int) -> Tensor:
    """Keys (..., Dk) with their rotary channels zeroed: none for rotary_dim 0."""
    return torch.cat([torch.zeros_like(key[..., :rotary_dim]), key[..., rotary_dim:]], dim=-1)
