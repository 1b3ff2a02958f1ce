"""The pass forward of Key-Value Means over steps of one chunk, and what the way back shares.

Shapes as in `fused_memory`; G query heads share a key/value head, n queries are read at a time.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from meanbank.core.bags import suits
from meanbank.core.precision import accumulator_dtype
from meanbank.ops.kvm.common import rounding_noise
from meanbank.ops.kvm.fused_keys import ScaledQueries, make_keys
from meanbank.ops.kvm.fused_memory import PreparedRows, Rows, WorkingMemory
from meanbank.ops.kvm.fused_writes import Step, Tokens
from meanbank.ops.kvm.memory import KVMRows, KVMUpdate
from meanbank.ops.kvm.options import KVMOptions
from meanbank.ops.kvm.routing import first_argmax, selection

CACHE = 2**21  # bytes of scores a core that are best read at a time


class Operands(NamedTuple):
    """The tensors of a call, in the dtype that it reads in; rows (N, M, ...) if they are carried.

    key, value and merge_gate begin with the window of the memory that was carried in.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    merge_gate: Tensor | None
    norm_weight: Tensor
    norm_bias: Tensor
    state_temperature: Tensor
    window_temperature: Tensor
    row_key: Tensor | None
    row_value: Tensor | None
    row_scale: Tensor | None


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call does that is not in its tensors; learns: whether there will be gradients."""

    options: KVMOptions
    steps: list[Step]
    dtype: torch.dtype
    carried: bool
    learns: bool

    @property
    def compressed(self) -> bool:
        """Whether keys may be: not for gradients of rows that are carried in, nor where a memory
        that begins is hardly used."""
        return not self.learns if self.carried else self.updates > 1

    @property
    def updates(self) -> int:
        return sum(step.overflow is not None for step in self.steps)


class Update(NamedTuple):
    """What undoes an update: the tokens (N, n) with rows of their own, the rows (N, C) that the
    others were added to, and what these rows were before; None where there are no such tokens."""

    appended: Tensor | None = None
    route: Tensor | None = None
    before: Tensor | None = None


class Heads(NamedTuple):
    """Heads of memory (of N) whose attention is computed at a time, and of their queries (B H)."""

    memory: slice
    query: slice


class Pass:
    """What the passes forward and backward share: the operands cut by steps, maps and buffers."""

    def __init__(self, call: Call, operands: Operands) -> None:
        self.options, self.steps, self.operands = call.options, call.steps, operands
        self.dtype, self.precise = call.dtype, accumulator_dtype(call.dtype)
        query, key = operands.query, operands.key
        self.heads, self.kv_heads = query.shape[:2], key.shape[:2]
        self.keys, self.row_key = make_keys(
            operands.norm_weight,
            operands.norm_bias,
            call.options,
            call.dtype,
            operands.row_key,
            compressed=call.compressed,
        )
        self.near = ScaledQueries(self._scale(operands.window_temperature))
        self.far = self.keys.reader(self._scale(operands.state_temperature), call.dtype)
        self.updates = call.updates
        self.capacity = call.steps[-1].rows
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        longest = max(step.count for step in call.steps)
        self.group = group = self.heads[1] // self.kv_heads[1]
        widest = max(step.rows + step.window for step in call.steps)
        value_dim = operands.value.shape[-1]
        heads, chunk = math.prod(self.kv_heads), call.options.chunk_size
        scores = group * longest * widest  # of one head
        at_once = heads_at_once(key.device, heads, scores * key.itemsize)
        self.shares = [
            Heads(slice(start, start + at_once), slice(start * group, (start + at_once) * group))
            for start in range(0, heads, at_once)
        ]
        similarities = heads * chunk * self.capacity if call.updates else 0
        self._sizes = {
            "values": at_once * widest * value_dim,
            "updates": heads * chunk * (self.keys.width + value_dim + 1),
            "scores": max(at_once * scores, similarities),
        }
        self._future = Future(longest, call.dtype, key.device) if longest > 1 else None

    def _scale(self, temperature: Tensor) -> Tensor:
        """Factors (H, 1, 1) of the queries of all heads of the batch."""
        scale = temperature.to(self.precise) / math.sqrt(self.operands.query.shape[-1])
        return scale.repeat(self.heads[0]).view(-1, 1, 1)

    def buffer(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory that every step uses anew."""
        if (name, dtype) not in self._buffers:
            device = self.operands.key.device
            size = self._sizes[name if name in self._sizes else "scores"]
            self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=device)
        return self._buffers[name, dtype][: math.prod(shape)].view(shape)

    def query(self, step: Step) -> Tensor:
        """(B H, n, Dk)"""
        return self.operands.query[:, :, step.queries].flatten(0, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """(N, ...) -> (B, Hkv, ...)"""
        return x.unflatten(0, self.kv_heads)

    def grouped(self, x: Tensor) -> Tensor:
        """(H, n, X) -> (N, G n, X): the queries of a group side by side."""
        return x.reshape(len(x) // self.group, -1, x.shape[-1])

    def meeting(self, queries: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        """What meets keys of the window and rows (N, G n, ...), of queries (H, n, Dk)."""
        near, far = self.near(queries, heads.query), self.far(queries, heads.query)
        return self.grouped(near), self.grouped(far)

    def exact(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys (N, L, Dk) and values (N, L, Dv) of the window."""
        key, value = self.operands.key, self.operands.value
        return key[:, :, step.exact].flatten(0, 1), value[:, :, step.exact].flatten(0, 1)

    def visible(
        self, step: Step, rows: PreparedRows | None, value: Tensor
    ) -> list[tuple[slice, Tensor]]:
        """Values of [memory rows; window], (N, M + L, Dv) in consecutive parts."""
        if rows is None:
            return [(slice(None), value)]
        if value.device.type != "cpu" or value.itemsize >= 4 or step.count == 1:
            return [(slice(step.rows), rows.values), (slice(step.rows, None), value)]
        # one product of what is contiguous is faster than two whose operands a CPU would copy
        shape = (len(value), step.rows + step.window, value.shape[-1])
        out = self.buffer("values", self.dtype, *shape)
        return [(slice(None), torch.cat([rows.values, value], dim=1, out=out))]

    def tokens(self, step: Step) -> tuple[Tensor, Tokens]:
        """The keys (N, C, Dk) that overflow, and what they write."""
        key, value, gate = (
            None if x is None else x[:, :, step.overflow].flatten(0, 1).to(self.precise)
            for x in self.operands[1:4]
        )
        assert key is not None and value is not None
        return key, Tokens(self.keys.stored(key), value, gate, self.options)

    def probabilities(
        self, step: Step, near: Tensor, far: Tensor, key: Tensor, rows: PreparedRows | None
    ) -> Tensor:
        """Softmax over [memory rows; window], (N, G n, M + L), for grouped queries of a step."""
        shape = (len(near), near.shape[1], step.rows + key.shape[1])
        scores = self.buffer("scores", self.dtype, *shape)
        torch.bmm(near, key.mT, out=scores[..., step.rows :])
        if self._future is not None:
            self._future.hide(scores.view(shape[0], -1, step.count, shape[2]))
        if rows is not None:
            torch.bmm(far, packed(rows.keys).mT, out=scores[..., : step.rows])
        return torch.softmax(scores, dim=-1, out=self.buffer("probabilities", self.dtype, *shape))


class Future:
    """Which scores of up to `count` queries on their own tokens are of later ones.

    They are overwritten, not added to: a NaN among them must not reach earlier queries. On a CPU
    that is done in their bits, since `masked_fill_` takes half as long as a softmax there.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.ones(count, count, dtype=torch.bool, device=device).triu_(1)
        self._bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        if suits(device):
            infinity = torch.tensor(-math.inf, dtype=dtype, device=device).view(self._bits)
            self._kept = (~self.hidden).to(self._bits).neg_()  # all bits or none
            self._infinity = self.hidden * infinity

    def hide(self, scores: Tensor) -> None:
        """Give no weight to what comes after each of n queries: scores (..., n, keys), n newest."""
        count = scores.shape[-2]
        here, newest = (slice(count), slice(count)), scores[..., -count:]
        if suits(scores.device):
            bits = newest.view(self._bits)
            bits.bitwise_and_(self._kept[here]).bitwise_or_(self._infinity[here])
        else:
            newest.masked_fill_(self.hidden[here], -math.inf)


def heads_at_once(device: torch.device, heads: int, score_bytes: int) -> int:
    """How many of `heads`, whose scores take so many bytes each, are best read at a time.

    Few enough for a CPU that their scores stay in its cores' caches from product to softmax to
    product; as equal a number as there can be.
    """
    if not suits(device):
        return heads
    fit = max(1, CACHE * torch.get_num_threads() // score_bytes)
    return -(-heads // -(-heads // fit))


def packed(x: Tensor) -> Tensor:
    """x, contiguous where products need it: in half precision a CPU would copy x, and slowly."""
    return x.contiguous() if x.device.type == "cpu" and x.itemsize < 4 else x


def forward(
    run: Pass, trace: list[KVMUpdate] | None, recording: bool
) -> tuple[Tensor, WorkingMemory | None, list[Update]]:
    """Outputs (B, H, T, Dv), the memory if it changed (or for the way back), and all updates."""
    query, value = run.operands.query, run.operands.value
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    flat = output.flatten(0, 1)
    memory, rows = begin(run, recording)
    updates = []
    for step in run.steps:
        if step.overflow is not None:
            assert memory is not None
            updates.append(take_in(run, step, memory, trace, recording))
        if memory is not None:
            rows = memory.prepared if memory.count else None
        queries, (key, value) = run.query(step), run.exact(step)
        for heads in run.shares:
            here = None if rows is None else rows.of_heads(heads.memory)
            near, far = run.meeting(queries[heads.query], heads)
            probabilities = run.probabilities(step, near, far, packed(key[heads.memory]), here)
            first, *others = run.visible(step, here, value[heads.memory])
            place = flat[heads.query, step.queries]
            read = place if run.group == 1 else None
            read = torch.bmm(probabilities[..., first[0]], first[1], out=read)
            for part, values in others:
                torch.baddbmm(read, probabilities[..., part], values, out=read)
            if run.group > 1:
                place.copy_(read.view(place.shape))
    return output, memory, updates


def begin(run: Pass, recording: bool) -> tuple[WorkingMemory | None, PreparedRows | None]:
    """The memory in front of the first step, to be written, or only to be read."""
    operands = run.operands
    rows: Rows | None = None
    if run.row_key is not None:
        assert operands.row_value is not None and operands.row_scale is not None
        rows = (run.row_key, operands.row_value, operands.row_scale)
    if run.updates or (recording and rows is not None):
        sizes = (math.prod(run.kv_heads), run.capacity, operands.value.shape[-1])
        return WorkingMemory.begin(run.keys, run.options, run.dtype, sizes, rows), None
    if rows is None:
        return None, None
    return None, PreparedRows.of(rows, run.keys, run.options, run.dtype)


@torch.no_grad()
def take_in(
    run: Pass, step: Step, memory: WorkingMemory, trace: list[KVMUpdate] | None, recording: bool
) -> Update:
    """Let a block overflow into the memory: decide, append, merge. Returns what undoes it."""
    _, tokens = run.tokens(step)
    if not memory.count:
        memory.append(tokens.opened("initial"))
        if trace is not None:
            everything = torch.arange(memory.count, device=tokens.value.device)
            describe(trace, run, step, memory, everything.expand(len(tokens.value), -1))
        return Update()
    met, lengths = run.keys.tokens(tokens.stored), run.keys.lengths(tokens.stored)
    before = memory.count
    similarity = run.buffer("scores", run.precise, *met.shape[:2], step.rows)
    torch.bmm(met, memory.normalised.mT, out=similarity[..., :before])
    novelty = appended = route = replaced = None
    if step.appended or trace is not None:
        novelty = similarity[..., :before].amax(dim=-1)
    if step.appended:
        assert novelty is not None
        appended = choose_tokens(run, step, novelty, rounding_noise(lengths, memory.lengths))
        memory.append(tokens.opened("append", appended))
        torch.bmm(met, memory.normalised[:, before:].mT, out=similarity[..., before:])
    if step.merges:
        route = choose_rows(run, similarity, rounding_noise(lengths, memory.lengths))
        replaced = memory.sums_at(route) if recording else None
        update = run.buffer("updates", run.precise, *met.shape[:2], memory.sums.shape[-1])
        memory.merge(route, tokens.merged(merge_weight(tokens, appended), out=update))
    if trace is not None:
        describe(trace, run, step, memory, appended, novelty, route)
    return Update(appended, route, replaced)


def choose_tokens(run: Pass, step: Step, novelty: Tensor, noise: Tensor) -> Tensor:
    """Indices (N, n) of the tokens that get rows of their own."""
    gate = run.operands.merge_gate
    gate = None if gate is None else gate[:, :, step.overflow]
    novelty, noise = run.by_head(novelty), run.by_head(noise)
    chosen = selection(novelty, noise, gate, step.start, step.appended, run.options)
    return chosen.flatten(0, 1)


def choose_rows(run: Pass, similarity: Tensor, noise: Tensor) -> Tensor:
    """Indices (N, C) of the rows that tokens are merged into."""
    allowed = run.by_head(similarity)[..., run.options.sink :]
    return run.options.sink + first_argmax(allowed, run.by_head(noise)).flatten(0, 1)


def merge_weight(tokens: Tokens, appended: Tensor | None) -> Tensor:
    """(N, C): 0 for tokens with rows of their own, which are not merged as well; else 1."""
    weight = torch.ones_like(tokens.value[..., 0])
    return weight if appended is None else weight.scatter_(-1, appended, 0)


def describe(
    trace: list[KVMUpdate],
    run: Pass,
    step: Step,
    memory: WorkingMemory,
    appended: Tensor | None,
    novelty: Tensor | None = None,
    route: Tensor | None = None,
) -> None:
    """Add a `KVMUpdate` of the update that was just made; it has no gradient."""
    if novelty is not None:
        if appended is None:
            appended = torch.empty_like(novelty[:, :0], dtype=torch.int64)
        if route is None:
            route = torch.empty_like(novelty, dtype=torch.int64)
        route = run.by_head(route.scatter(-1, appended, -1))
        novelty = run.by_head(novelty)
    assert appended is not None
    rows = KVMRows(*map(run.by_head, memory.exported()))
    trace.append(KVMUpdate(step.start, run.by_head(appended), novelty, route, rows))
