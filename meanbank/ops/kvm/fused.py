"""Key-Value Means attention, fast: one pass over chunks, and a hand-written one back.

Equal to `reference.py` in outputs and all gradients. What makes it fast: memory keys in fewer
numbers (`fused_keys`), normalised keys and readouts that are computed anew only for rows that were
written (`fused_memory`), scores of memory and window in one buffer that is small enough for a
cache (a few heads at a time), and a backward pass that restores the memory of each chunk from what
its update replaced. One token at a time, which only joins the window, goes another way
(`fused_decode`).
"""

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meanbank.core.precision import accumulator_dtype, without_autocast
from meanbank.ops.kvm.common import Block, KVMWeights, join, resumed
from meanbank.ops.kvm.fused_backward import backward
from meanbank.ops.kvm.fused_decode import joins_the_window, kvm_attention_of_one
from meanbank.ops.kvm.fused_forward import Call, Operands, Pass, Update, forward
from meanbank.ops.kvm.fused_memory import WorkingMemory
from meanbank.ops.kvm.fused_writes import Step, schedule
from meanbank.ops.kvm.memory import KVMMemory, KVMRows, KVMUpdate
from meanbank.ops.kvm.options import KVMOptions


def kvm_attention_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merge_gate: Tensor | None,
    weights: KVMWeights,
    options: KVMOptions,
    memory: KVMMemory | None,
    trace: list[KVMUpdate] | None,
) -> tuple[Tensor, KVMMemory]:
    """See `meanbank.ops.kvm_attention`, which checks the arguments."""
    if memory is not None and joins_the_window(query, key, value, memory, options):
        return kvm_attention_of_one(query, key, value, merge_gate, weights, options, memory)
    length, seen, held, rows = query.shape[2], 0, 0, None
    if memory is not None:
        seen, rows, window = resumed(memory, key, value, merge_gate)
        held = window[0].shape[2]
        key, value, merge_gate = join([window, (key, value, merge_gate)])
    steps = schedule(seen, length, held, rows.count if rows else 0, options)
    dtype = torch.promote_types(key.dtype, value.dtype)
    if options.read_key == "raw":  # never in half precision: a sum grows with its writes
        dtype = accumulator_dtype(dtype)
    operands = Operands(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        merge_gate,
        *(getattr(weights, field.name) for field in dataclasses.fields(weights)),
        *_by_head(rows, dtype),
    )
    learns = torch.is_grad_enabled()
    learns = learns and any(x is not None and x.requires_grad for x in operands)
    call = Call(options, steps, dtype, carried=rows is not None, learns=learns)
    if learns:
        output, *new = FusedKVM.apply(call, trace, *operands)
    else:
        output, changed, _ = forward(Pass(call, operands), trace, recording=False)
        new = () if changed is None else changed.exported()
    if call.updates:
        heads, precise = key.shape[:2], accumulator_dtype(key.dtype)
        rows = KVMRows(*(x.unflatten(0, heads).to(precise) for x in new))
    kept = _window((key, value, merge_gate), steps[-1], owned=held > 0)
    return output.to(value.dtype), KVMMemory(rows, *kept, seen + length)


class FusedKVM(torch.autograd.Function):
    """Outputs, and rows (N, M, ...) if there was an update; once differentiable."""

    @staticmethod
    def forward(ctx, call: Call, trace: list[KVMUpdate] | None, *tensors: Tensor | None):
        operands = Operands._make(tensors)
        output, memory, updates = forward(Pass(call, operands), trace, recording=True)
        ctx.call = call
        ctx.set_materialize_grads(False)
        sums = None if memory is None else memory.sums
        ctx.save_for_backward(*operands, sums, *(x for update in updates for x in update))
        if memory is None or not call.updates:
            return (output,)
        return (output, *memory.exported())

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient: Tensor | None, *rows_gradient: Tensor | None):
        tensors, count = ctx.saved_tensors, len(Operands._fields)
        operands, sums, undo = Operands._make(tensors[:count]), tensors[count], tensors[count + 1 :]
        updates = list(map(Update._make, zip(*[iter(undo)] * len(Update._fields), strict=True)))
        with without_autocast(operands.query.device):
            run, memory = Pass(ctx.call, operands), None
            if sums is not None:
                sums = sums.clone()  # it changes on the way back, which may be gone twice
                memory = WorkingMemory(run.keys, run.options, sums, sums.shape[1], run.dtype)
            needed = dict(zip(Operands._fields, ctx.needs_input_grad[2:], strict=True))
            gradients = backward(run, memory, updates, output_gradient, rows_gradient, needed)
        return None, None, *gradients


def _by_head(rows: KVMRows | None, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """(B, Hkv, M, ...) -> (N, M, ...), in the precision of sums for tokens of `dtype`."""
    if rows is None:
        return None, None, None
    return tuple(x.flatten(0, 1).to(accumulator_dtype(dtype)) for x in rows.tensors())


def _window(block: Block, step: Step, owned: bool) -> Block:
    """What the next call sees exactly, in storage of its own; `owned` says that this is."""
    key, value, gate = block
    if owned and step.exact == slice(0, key.shape[2]):
        return key, value, gate
    key, value = (x[:, :, step.exact].clone() for x in (key, value))
    return key, value, None if gate is None else gate[:, :, step.exact].clone()
