"""When blocks overflow, and what their tokens write: rows of their own, or updates of others.

Shapes as in `fused_memory`.
"""

import dataclasses

import torch
from torch import Tensor

from meanbank.ops.kvm.common import gather, spans
from meanbank.ops.kvm.options import KVMOptions, Part, Write


@dataclasses.dataclass(frozen=True)
class Step:
    """Some queries of one chunk, and the update of the memory before them, if there is one.

    queries: which of the call's; exact: which of its keys they see exactly, themselves included;
    overflow: which of its keys enter the memory first; start: the position of the first of those;
    appended: how many of them get rows of their own; rows: how many rows there are then.
    """

    queries: slice
    exact: slice
    overflow: slice | None
    start: int
    appended: int
    rows: int

    @property
    def count(self) -> int:
        """Queries of the step."""
        return self.queries.stop - self.queries.start

    @property
    def window(self) -> int:
        """Keys that they see exactly."""
        return self.exact.stop - self.exact.start

    @property
    def merges(self) -> bool:
        """Whether some tokens are added to rows of others."""
        assert self.overflow is not None
        return self.appended < self.overflow.stop - self.overflow.start


def schedule(seen: int, length: int, held: int, rows: int, options: KVMOptions) -> list[Step]:
    """The steps of `length` queries after `seen` tokens, of which the keys start with `held`."""
    chunk, window = options.chunk_size, options.window_chunks * options.chunk_size
    first, steps = seen - held, []  # the position of the first key
    for start, stop in spans(seen, seen + length, chunk):
        oldest = max(0, (start // chunk + 1) * chunk - window)
        overflow, appended = None, 0
        if start % chunk == 0 and start >= window:
            overflow = slice(start - window - first, start - window - first + chunk)
            appended = options.rows_to_append(start, rows) if rows else chunk
            rows += appended
        queries, exact = slice(start - seen, stop - seen), slice(oldest - first, stop - first)
        steps.append(Step(queries, exact, overflow, start - window, appended, rows))
    return steps


class Tokens:
    """The tokens of one overflowing block, and the gradients of what they write.

    stored: (N, C, R) keys as they are stored; value: (N, C, Dv); gate: (N, C) or None.
    """

    def __init__(
        self, stored: Tensor, value: Tensor, gate: Tensor | None, options: KVMOptions
    ) -> None:
        self.stored, self.value, self.gate, self.options = stored, value, gate, options

    def opened(self, write: Write, chosen: Tensor | None = None) -> Tensor:
        """Rows (N, n, W) of their own for all tokens or those chosen (N, n)."""
        stored, value, gate = self._at(chosen)
        gated_value = _times(value, self._factor(gate, write, "value"))
        if self.options.value_scale == "radius":
            # the gate never scales the radius of initial rows
            opening = value if write == "initial" else gated_value
            scale = torch.linalg.vector_norm(opening, dim=-1, keepdim=True)
        else:
            scale = torch.ones_like(value[..., :1])
        gated_key = _times(stored, self._factor(gate, write, "key"))
        return torch.cat([gated_key, gated_value, scale], dim=-1)

    def merged(self, weight: Tensor, out: Tensor) -> Tensor:
        """Updates (N, C, W) of rows, written to `out`: weight (N, C) is 1 for the tokens that are
        merged, else 0."""
        key, value, count = self._parts(out)
        torch.mul(self.stored, self._merge_factor(weight, "key")[..., None], out=key)
        torch.mul(self.value, self._merge_factor(weight, "value")[..., None], out=value)
        count[..., 0] = weight if self.options.value_scale == "count" else 0
        return out

    def start_backward(self) -> None:
        self.stored_gradient = torch.zeros_like(self.stored)
        self.value_gradient = torch.zeros_like(self.value)
        self.gate_gradient = None if self.gate is None else torch.zeros_like(self.gate)

    def opened_backward(self, grad: Tensor, write: Write, chosen: Tensor | None = None) -> None:
        """Take in the gradient (N, n, W) of opened rows."""
        stored, value, gate = self._at(chosen)
        stored_grad, value_grad, scale_grad = self._parts(grad)
        key_factor, value_factor = (self._factor(gate, write, part) for part in ("key", "value"))
        radius_grad = None
        if self.options.value_scale == "radius":
            opening = value if write == "initial" else _times(value, value_factor)
            norm = torch.linalg.vector_norm(opening, dim=-1, keepdim=True)
            radius_grad = torch.where(norm > 0, opening * (scale_grad / norm), 0)
            if write != "initial":
                value_grad, radius_grad = value_grad + radius_grad, None
        gate_grad = self._gate_gradient(write, (stored_grad, stored), (value_grad, value))
        value_grad = _times(value_grad, value_factor)
        if radius_grad is not None:
            value_grad = value_grad + radius_grad
        self._add(_times(stored_grad, key_factor), value_grad, gate_grad, chosen)

    def merged_backward(self, grad: Tensor, weight: Tensor) -> None:
        """Take in the gradient (N, C, W) of updates."""
        stored_grad, value_grad, _ = self._parts(grad)
        key_factor, value_factor = (self._merge_factor(weight, part) for part in ("key", "value"))
        gate_grad = self._gate_gradient(
            "merge", (stored_grad, self.stored), (value_grad, self.value)
        )
        if gate_grad is not None:
            gate_grad = gate_grad * weight
        self._add(_times(stored_grad, key_factor), _times(value_grad, value_factor), gate_grad)

    def _merge_factor(self, weight: Tensor, part: Part) -> Tensor:
        factor = self._factor(self.gate, "merge", part)
        return weight if factor is None else weight * factor

    def _factor(self, gate: Tensor | None, write: Write, part: Part) -> Tensor | None:
        return gate if self.options.gates(write, part) else None

    def _gate_gradient(
        self, write: Write, key: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """The gate's gradient (N, n) from (gradient of the written, ungated) of both parts."""
        if self.gate is None:
            return None
        gated = []
        if self.options.gates(write, "key"):
            gated.append((key[0] * key[1]).sum(dim=-1))
        if self.options.gates(write, "value"):
            gated.append((value[0] * value[1]).sum(dim=-1))
        return sum(gated[1:], gated[0]) if gated else None

    def _at(self, chosen: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if chosen is None:
            return self.stored, self.value, self.gate
        gate = None if self.gate is None else self.gate.gather(-1, chosen)
        return gather(self.stored, chosen), gather(self.value, chosen), gate

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([self.stored.shape[-1], self.value.shape[-1], 1], dim=-1)

    def _add(
        self,
        stored_grad: Tensor,
        value_grad: Tensor,
        gate_grad: Tensor | None,
        chosen: Tensor | None = None,
    ) -> None:
        pairs = [(self.stored_gradient, stored_grad), (self.value_gradient, value_grad)]
        if self.gate_gradient is not None and gate_grad is not None:
            pairs.append((self.gate_gradient[..., None], gate_grad[..., None]))
        for total, grad in pairs:
            if chosen is None:
                total.add_(grad)
            else:
                total.scatter_add_(1, chosen[..., None].expand_as(grad), grad)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """x (N, n, D) times a factor (N, n)."""
    return x if factor is None else x * factor[..., None]
