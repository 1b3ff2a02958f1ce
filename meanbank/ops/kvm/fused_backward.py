"""The pass backward of Key-Value Means, by hand: steps in reverse, each with the memory it had.

Going back, an update is undone from what it replaced, so that the memory is again what the queries
before it read, to the last bit. Probabilities are computed anew. Shapes as in `fused_forward`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meanbank.ops.kvm.fused_forward import Pass, Update, merge_weight, packed
from meanbank.ops.kvm.fused_keys import CompressedKeys, accumulate
from meanbank.ops.kvm.fused_memory import MemoryGradients, WorkingMemory
from meanbank.ops.kvm.fused_writes import Step


class Seen(NamedTuple):
    """Gradients to be added up of what queries see: keys, values and gates (N, T, ...), in the
    precision of sums, and the memory."""

    key: Tensor
    value: Tensor
    gate: Tensor | None
    memory: MemoryGradients | None


QUERY_SIDE = ("query", "window_temperature", "state_temperature")
NORM = ("norm_weight", "norm_bias")


def backward(
    run: Pass,
    memory: WorkingMemory | None,
    updates: list[Update],
    output_gradient: Tensor | None,
    rows_gradient: tuple[Tensor | None, ...],
    needed: dict[str, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of the operands, None for those that have none.

    memory: as the pass forward left it; it changes. output_gradient: (B, H, T, Dv) or None;
    rows_gradient: of the rows (N, M, ...) that are carried on. needed: which operands need one.
    """
    # queries are mapped by parameters of LN_s if keys are compressed
    users = QUERY_SIDE + (NORM if isinstance(run.keys, CompressedKeys) else ())
    query = seen = None
    if output_gradient is not None and any(needed[name] for name in users):
        query = torch.empty_like(run.operands.query, memory_format=torch.contiguous_format)
    if any(needed[name] for name in needed if name not in QUERY_SIDE):
        seen = start(run, memory, rows_gradient)
    for step in reversed(run.steps):
        if output_gradient is not None:
            here = None if query is None else query.flatten(0, 1)[:, step.queries]
            unread(run, step, memory, output_gradient[:, :, step.queries], here, seen)
        if step.overflow is not None:
            assert memory is not None
            update = updates.pop()
            if seen is not None:
                unwrite(run, step, update, memory, seen)
            if update.route is not None and update.before is not None:
                memory.restore(update.route, update.before)
            memory.shrink(memory.count - step.appended)
    return finish(run, memory, query, seen)


def start(
    run: Pass, memory: WorkingMemory | None, rows_gradient: tuple[Tensor | None, ...]
) -> Seen:
    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros(math.prod(run.kv_heads), *x.shape[2:], dtype=run.precise)

    gate = run.operands.merge_gate
    return Seen(
        zeros(run.operands.key),
        zeros(run.operands.value),
        None if gate is None else zeros(gate),
        None if memory is None else MemoryGradients(memory, rows_gradient),
    )


def unread(
    run: Pass,
    step: Step,
    memory: WorkingMemory | None,
    output_gradient: Tensor,
    query_gradient: Tensor | None,
    seen: Seen | None,
) -> None:
    """The gradients of one step's attention, given that of its outputs (B, H, n, Dv): written to
    query_gradient (B H, n, Dk), added to `seen`."""
    rows = memory.prepared if memory is not None and step.rows else None
    queries, (key, value) = run.query(step), run.exact(step)
    output_gradient = output_gradient.flatten(0, 1)
    for heads in run.shares:
        own, keys = queries[heads.query], packed(key[heads.memory])
        here = None if rows is None else rows.of_heads(heads.memory)
        near, far = run.meeting(own, heads)
        probabilities = run.probabilities(step, near, far, keys, here)
        gradient = run.grouped(output_gradient[heads.query])
        by_probability = run.buffer("gradients", run.dtype, *probabilities.shape)
        for part, values in run.visible(step, here, value[heads.memory]):
            torch.bmm(gradient, values.mT, out=by_probability[..., part])
        by_score = torch.ops.aten._softmax_backward_data.out(
            by_probability,
            probabilities,
            -1,
            run.dtype,
            grad_input=run.buffer("scores", run.dtype, *probabilities.shape),
        )
        far_scores, near_scores = map(packed, by_score.tensor_split([step.rows], dim=-1))
        if seen is not None:
            far_share, near_share = map(packed, probabilities.tensor_split([step.rows], dim=-1))
            accumulate(seen.value[heads.memory, step.exact], near_share.mT, gradient)
            accumulate(seen.key[heads.memory, step.exact], near_scores.mT, near)
            if here is not None and seen.memory is not None:
                seen.memory.read(heads.memory, far_scores, far, far_share, gradient)
        if query_gradient is not None:
            by_near = torch.bmm(near_scores, keys).view_as(own)
            found = run.near.backward(own, by_near, heads.query)
            if here is not None:
                by_far = torch.bmm(far_scores, here.keys).view(*own.shape[:2], -1)
                found = found + run.far.backward(own, by_far, heads.query)
            query_gradient[heads.query] = found


def unwrite(run: Pass, step: Step, update: Update, memory: WorkingMemory, seen: Seen) -> None:
    """Add to `seen` the gradients of the tokens that an update took in, before it is undone."""
    key, tokens = run.tokens(step)
    tokens.start_backward()
    before, gradients = memory.count - step.appended, seen.memory
    assert gradients is not None
    if not before:
        gradients.settle(None)
        tokens.opened_backward(gradients.sums[:, : memory.count], "initial")
    else:
        own = torch.arange(before, memory.count, device=key.device).expand(len(key), -1)
        written = own if update.route is None else torch.cat([update.route, own], dim=1)
        gradients.settle(memory.changed(written))
        if update.route is not None:
            weight = merge_weight(tokens, update.appended)
            tokens.merged_backward(gradients.at(update.route), weight)
        if update.appended is not None:
            opened = gradients.sums[:, before : memory.count]
            tokens.opened_backward(opened, "append", update.appended)
            opened.zero_()
    seen.key[:, step.overflow] += run.keys.stored_backward(key, tokens.stored_gradient)
    seen.value[:, step.overflow] += tokens.value_gradient
    if seen.gate is not None and tokens.gate_gradient is not None:
        seen.gate[:, step.overflow] += tokens.gate_gradient


def finish(
    run: Pass, memory: WorkingMemory | None, query: Tensor | None, seen: Seen | None
) -> tuple[Tensor | None, ...]:
    """What was added up, for each operand, in its dtype."""
    by_sequence, by_norm, by_rows = (None, None, None), (None, None), (None, None, None)
    by_window, by_state = _by_temperature(run, run.near.scale_gradient), None
    if seen is not None:
        by_sequence = (None if x is None else run.by_head(x) for x in seen[:3])
    if memory is not None:
        by_state = _by_temperature(run, run.far.scale_gradient)
        if seen is not None and seen.memory is not None:
            if memory.count:  # rows that were carried in
                seen.memory.settle(None)
                by_rows = memory.parts(seen.memory.sums[:, : memory.count])
            by_norm = run.keys.parameter_gradients(run.far)
    found = (query, *by_sequence, *by_norm, by_state, by_window, *by_rows)
    return tuple(
        None if x is None or gradient is None else gradient.to(x.dtype)
        for x, gradient in zip(run.operands, found, strict=True)
    )


def _by_temperature(run: Pass, scale_gradient: Tensor) -> Tensor:
    """The gradient (H,) of temperatures from that of the factors (B H, 1, 1)."""
    scale = 1 / math.sqrt(run.operands.query.shape[-1])
    return scale_gradient.view(run.heads).sum(dim=0) * scale
