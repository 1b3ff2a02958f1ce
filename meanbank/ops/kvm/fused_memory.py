"""The memory of a call in progress: rows as sums, what is read of them, and how writes are undone.

Shapes as in `fused_keys`; W = R + Dv + 1 numbers are a row: its key sum, value sum and scale.
"""

import torch
from torch import Tensor

from meanbank.ops.kvm.common import EPSILON, readout
from meanbank.ops.kvm.fused_keys import Keys, accumulate
from meanbank.ops.kvm.options import KVMOptions

Rows = tuple[Tensor, Tensor, Tensor]  # key sums (N, M, Dk), value sums (N, M, Dv), scales (N, M)


class PreparedRows:
    """What queries meet of rows: normalised keys (N, M, P) and readouts (N, M, Dv).

    It can be made once for rows that do not change, and read many times.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def of(cls, rows: Rows, keys: Keys, options: KVMOptions, dtype: torch.dtype) -> "PreparedRows":
        key, value, scale = rows
        if options.read_key == "normalized":
            key = keys.normalised(key)
        return cls(key.to(dtype), readout(value, scale, options).to(dtype))

    def of_heads(self, heads: slice) -> "PreparedRows":
        return PreparedRows(self.keys[heads], self.values[heads])


class WorkingMemory:
    """Rows with room for those to come, and what is read of them, kept up to date.

    Nothing of it is shared with tensors that were carried in, and all of it changes in place.
    """

    def __init__(
        self, keys: Keys, options: KVMOptions, sums: Tensor, count: int, dtype: torch.dtype
    ) -> None:
        """sums: (N, capacity, W), of which the first `count` rows are there; read in `dtype`."""
        self.key_form, self.options, self.sums = keys, options, sums
        self.count = 0
        heads, capacity, width = sums.shape
        size = (heads, capacity, keys.normalised_width)
        self._normalised = sums.new_empty(size)
        self._lengths = sums.new_empty(size[:2])
        self._values = sums.new_empty(heads, capacity, width - keys.width - 1, dtype=dtype)
        same = dtype == sums.dtype
        self._read_keys = self._normalised if same else sums.new_empty(size, dtype=dtype)
        self._offset = torch.arange(heads, device=sums.device)[:, None] * capacity
        self._grow(count)

    @classmethod
    def begin(
        cls,
        keys: Keys,
        options: KVMOptions,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        rows: Rows | None,
    ) -> "WorkingMemory":
        """With a copy of rows that were carried in; sizes: heads N, capacity and Dv."""
        heads, capacity, value_dim = sizes
        sums = keys.weight.new_empty(heads, capacity, keys.width + value_dim + 1)
        count = 0
        if rows is not None:
            key, value, scale = rows
            count = key.shape[1]
            torch.cat([key, value, scale[..., None]], dim=-1, out=sums[:, :count])
        return cls(keys, options, sums, count, dtype)

    @property
    def normalised(self) -> Tensor:
        """Keys (N, M, P) that tokens meet on their way in."""
        return self._normalised[:, : self.count]

    @property
    def lengths(self) -> Tensor:
        """Norms (N, M) of the whole normalised keys."""
        return self._lengths[:, : self.count]

    @property
    def prepared(self) -> PreparedRows:
        keys = self._read_keys
        if self.options.read_key == "raw":
            keys = self.sums[..., : self.key_form.width]
        return PreparedRows(keys[:, : self.count], self._values[:, : self.count])

    def append(self, rows: Tensor) -> None:
        """Rows (N, n, W) of their own for n tokens."""
        added = rows.shape[1]
        self.sums[:, self.count : self.count + added] = rows
        self._grow(added)

    def flat(self, route: Tensor) -> Tensor:
        """Where rows route (N, C) are in flat buffers: (N C,)."""
        return (route + self._offset).flatten()

    def touched(self, route: Tensor) -> Tensor | None:
        """As `flat`, but None for all rows if they are no more than tokens."""
        return None if self.count <= route.shape[1] else self.flat(route)

    def changed(self, route: Tensor) -> Tensor | None:
        """As `touched`, of what is read: every row ages with an update in "chunk_count"."""
        return None if self.options.value_scale == "chunk_count" else self.touched(route)

    def take(self, buffer: Tensor, touched: Tensor | None) -> Tensor:
        """Rows of a buffer (N, capacity, X): (N, C, X) as routed, or a view of all."""
        if touched is None:
            return buffer[:, : self.count]
        return buffer.flatten(0, 1).index_select(0, touched).unflatten(0, (len(buffer), -1))

    def put(self, buffer: Tensor, touched: Tensor | None, rows: Tensor) -> None:
        """The reverse of `take`; rows that are touched twice are equal."""
        if touched is None:
            buffer[:, : self.count] = rows
        else:
            buffer.flatten(0, 1)[touched] = rows.flatten(0, 1)

    def sums_at(self, route: Tensor) -> Tensor:
        """A copy of all of rows route (N, C) that a `merge` may change, as `restore` needs it."""
        touched = self.touched(route)
        sums = self.take(self.sums, touched)
        return sums.clone() if touched is None else sums

    def merge(self, route: Tensor, update: Tensor) -> None:
        """Add update (N, C, W) to the rows route (N, C)."""
        self.sums.flatten(0, 1).index_add_(0, self.flat(route), update.flatten(0, 1))
        self._age(1)
        self._refresh(self.changed(route))

    def restore(self, route: Tensor, before: Tensor) -> None:
        """Undo a `merge`, to the last bit."""
        self._age(-1)
        self.put(self.sums, self.touched(route), before)
        self._refresh(self.changed(route), routes=False)

    def shrink(self, count: int) -> None:
        """Undo an `append`."""
        self.count = count

    def exported(self) -> Rows:
        """Sums of whole keys and of values, and scales, in storage of their own."""
        key, value, scale = self.parts(self.sums[:, : self.count])
        return self.key_form.whole(key), value.clone(), scale.clone()

    def parts(self, rows: Tensor) -> Rows:
        """Key sums (N, n, R), value sums and scales of rows (N, n, W)."""
        key, value, scale = rows.tensor_split([self.key_form.width, rows.shape[-1] - 1], dim=-1)
        return key, value, scale[..., 0]

    def _grow(self, added: int) -> None:
        new = slice(self.count, self.count + added)
        self.count += added
        if added:
            keys, values = self._read(self.sums[:, new])
            self._normalised[:, new] = keys
            self._lengths[:, new] = self.key_form.normalised_lengths(keys)
            self._values[:, new] = values
            if self._read_keys is not self._normalised:
                self._read_keys[:, new] = keys

    def _age(self, updates: int) -> None:
        if self.options.value_scale == "chunk_count":
            self.sums[:, : self.count, -1] += updates

    def _refresh(self, touched: Tensor | None, routes: bool = True) -> None:
        """Bring what is read of touched rows up to date, and what tokens meet if some will."""
        keys, values = self._read(self.take(self.sums, touched))
        self.put(self._values, touched, values)
        self.put(self._read_keys, touched, keys.to(self._read_keys.dtype))
        if routes:
            lengths = self.key_form.normalised_lengths(keys)
            self.put(self._lengths[..., None], touched, lengths[..., None])
            if self._read_keys is not self._normalised:
                self.put(self._normalised, touched, keys)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised keys and readouts of rows (N, n, W)."""
        key, value, scale = self.parts(rows)
        values = readout(value, scale, self.options).to(self._values.dtype)
        return self.key_form.normalised(key), values


class MemoryGradients:
    """Gradients of what is read of rows, and of the sums W that it is computed from.

    The former are added up as long as the rows stay as they are; `settle` turns them into the
    latter, which is linear, before that changes.
    """

    def __init__(self, memory: WorkingMemory, of_rows: tuple[Tensor | None, ...]) -> None:
        """of_rows: gradients of what `exported` gave, if there are any."""
        self.memory = memory
        prepared, sums = memory.prepared, memory.sums
        heads, capacity, _ = sums.shape
        self.sums = torch.zeros_like(sums)
        self.values = sums.new_zeros(heads, capacity, prepared.values.shape[-1])
        self.raw = memory.options.read_key == "raw"
        width = memory.key_form.width
        if self.raw:
            self.keys = self.sums[..., :width]
        else:
            self.keys = sums.new_zeros(heads, capacity, memory.key_form.normalised_width)
        self._carried_on(*of_rows)

    def read(
        self, heads: slice, scores: Tensor, query: Tensor, probabilities: Tensor, output: Tensor
    ) -> None:
        """Add what a read by some heads leaves: gradients of scores (N, n, M) and output."""
        count = scores.shape[-1]
        accumulate(self.keys[heads, :count], scores.mT, query)
        accumulate(self.values[heads, :count], probabilities.mT, output)

    def settle(self, touched: Tensor | None) -> None:
        """For rows that are touched (all for None) bring `sums` up to date."""
        memory = self.memory
        keys, values, sums = (
            memory.take(x, touched) for x in (self.keys, self.values, memory.sums)
        )
        if touched is not None:  # rows that are touched twice count once
            once = self._once(touched)
            keys, values = keys * once, values * once
        key, value, scale = memory.parts(sums)
        gradient = torch.zeros_like(sums)
        key_gradient, value_gradient, scale_gradient = memory.parts(gradient)
        if not self.raw:
            key_gradient.copy_(memory.key_form.normalised_backward(key, keys))
        readout_backward(value, scale, values, memory.options, value_gradient, scale_gradient)
        if touched is None:
            self.sums[:, : memory.count] += gradient
        else:
            self.sums.flatten(0, 1).index_add_(0, touched, gradient.flatten(0, 1))
        for read in (self.values,) if self.raw else (self.values, self.keys):
            if touched is None:
                read[:, : memory.count] = 0
            else:
                read.flatten(0, 1).index_fill_(0, touched, 0)

    def at(self, route: Tensor) -> Tensor:
        """Gradients (N, C, W) of the rows route (N, C)."""
        return self.memory.take(self.sums, self.memory.flat(route))

    def _carried_on(
        self, key: Tensor | None = None, value: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        key_sums, value_sums, scale_sums = self.memory.parts(self.sums)
        if key is not None:
            rows, _, _ = self.memory.parts(self.memory.sums)
            key_sums += self.memory.key_form.whole_backward(rows, key)
        if value is not None:
            value_sums += value
        if scale is not None:
            scale_sums += scale

    def _once(self, touched: Tensor) -> Tensor:
        """1 at one of the occurrences of each row, else 0: (N, C, 1)."""
        heads, capacity, _ = self.sums.shape
        number = torch.arange(len(touched), device=touched.device)
        last = number.new_empty(heads * capacity).index_copy_(0, touched, number)
        return (last[touched] == number).to(self.sums.dtype).view(heads, -1, 1)


def readout_backward(
    value: Tensor,
    scale: Tensor,
    grad: Tensor,
    options: KVMOptions,
    value_gradient: Tensor,
    scale_gradient: Tensor,
) -> None:
    """Gradients of `readout`, written to the last two; value, grad (N, n, Dv), scale (N, n)."""
    scale = scale[..., None]
    if options.value_scale == "radius":
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        safe = norm.clamp_min(EPSILON)
        along = (value * grad).sum(dim=-1, keepdim=True) / safe
        scale_gradient.copy_(along[..., 0])
        # below EPSILON the norm is a constant
        turned = torch.where(norm > EPSILON, along * scale / safe.square(), 0)
        torch.sub(grad * (scale / safe), value * turned, out=value_gradient)
    else:
        torch.div(grad, scale, out=value_gradient)
        scale_gradient.copy_(-(value * value_gradient).sum(dim=-1) / scale[..., 0])
