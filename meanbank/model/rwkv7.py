"""The RWKV-7 time mix (arXiv 2503.14456), a mixer with a matrix a head for its memory."""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from meanbank.core.context import Context
from meanbank.core.flops import Flops, linear_flops, products
from meanbank.core.geometry import Geometry, merge_heads, split_heads
from meanbank.core.layout import Layout
from meanbank.core.precision import accumulator_dtype
from meanbank.core.record import Record
from meanbank.core.state import State
from meanbank.core.tail import Tail, tail_like, tail_nbytes
from meanbank.model.backbone import Backbone
from meanbank.model.mixer import Mixer
from meanbank.model.plan import LayerPlan
from meanbank.model.replay import Replay
from meanbank.ops.rwkv7 import rwkv7_recurrence
from meanbank.ops.token_shift import shift_start, token_shift
from meanbank.values import Place
from meanbank.values.low_rank import LowRank, rounded_rank

# Each input is the layer's, shifted towards the previous token by a mix of its own; the number is
# the power that shapes the mix's start: 1 - (channel / width) ** (power * ratio).
INPUTS = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}


def decay_rank(width: int) -> int:
    """Rank of the decay's and the rate's maps."""
    return rounded_rank(1.8 * width**0.5)


def gate_rank(width: int) -> int:
    """Rank of the output gate's map."""
    return rounded_rank(0.6 * width**0.8)


@dataclasses.dataclass(frozen=True)
class TimeMixState(State):
    """What a time mix carries on.

    last: the last token's input, which the next one is shifted towards.
    start: the same of x0, where other layers read this one's values and its input is not x0.
    matrix: (B, H, Dv, Dk) the memory, in fp32 or better.
    values: what the value source carries on.
    past: an earlier matrix and what came after it, where tokens can be forgotten.
    """

    part = "matrix"

    last: Tail
    start: Tail | None
    matrix: Tensor
    values: Any
    past: Replay | None

    @property
    def undoable(self) -> int:
        if self.past is None:
            return 0
        parts = (self.last, self.start, self.values, self.past)
        return min(part.undoable for part in parts if part is not None)

    def crop(self, tokens: int) -> "TimeMixState":
        self.check_crop(tokens)
        assert self.past is not None  # or nothing is undoable
        past = self.past.crop(tokens)
        matrix = past.read() if tokens else self.matrix
        last, values = self.last.crop(tokens), self.values and self.values.crop(tokens)
        start = self.start and self.start.crop(tokens)
        return TimeMixState(last, start, matrix, values, past)

    @classmethod
    def joined(cls, states, seen):
        if any(state.past is None for state in states):
            states = [dataclasses.replace(state, past=None) for state in states]
        return super().joined(states, seen)

    def limited(self, record: Record) -> "TimeMixState":
        state = super().limited(record)
        return state if record.undo else dataclasses.replace(state, past=None)


class TimeMix(Mixer):
    """Receptance, decay, key, value, in-context rate and gate from shifted inputs; see the paper.

    The first token's predecessor is zero.
    """

    def __init__(
        self, plan: LayerPlan, geometry: Geometry, place: Place, backbone: Backbone
    ) -> None:
        super().__init__(plan, geometry, place, backbone)
        hidden = geometry.hidden_size
        inputs = [name for name in INPUTS if name != "value" or plan.values.reads_stream]
        self.shifts = nn.ParameterDict({name: torch.empty(hidden) for name in inputs})
        keys, width = geometry.key_width, geometry.value_width
        self.receptance = nn.Linear(hidden, keys, bias=False)
        self.key = nn.Linear(hidden, keys, bias=False)
        self.values = plan.values.build(geometry, place)
        self.decay = LowRank(hidden, decay_rank(hidden), keys)
        self.rate = LowRank(hidden, decay_rank(hidden), keys)
        self.gate = LowRank(hidden, gate_rank(hidden), width, based=False)
        self.removal = nn.Parameter(torch.empty(keys))  # k_k of the paper
        self.replacement = nn.Parameter(torch.empty(keys))  # k_a
        self.bonus = nn.Parameter(torch.empty(geometry.num_heads, geometry.key_dim))  # r_k
        self.norm = nn.GroupNorm(geometry.num_heads, width, eps=64e-5)
        self.output = nn.Linear(width, hidden, bias=False)

    def forward(
        self, x: Tensor, start: Tensor | None, context: Context, state: TimeMixState | None
    ) -> tuple[Tensor, TimeMixState]:
        layout = context.layout
        before = layout.before(x, state and state.last, zero=True)
        shifted = {name: token_shift(x, mix, before) for name, mix in self.shifts.items()}
        receptance, key, removal, rate, log_decay = self._address(shifted)
        value_input = shifted.get("value", x)
        values, value_state = self.values(value_input, start, context, state and state.values)
        value = values.dense()
        inputs = [receptance, log_decay, key, value, removal, rate]
        output, matrix = self._recur(inputs, state and state.matrix, layout)
        bonus = (receptance * key * self.bonus[:, None]).sum(dim=-1, keepdim=True)
        output = self._normalized(merge_heads(output)) + merge_heads(bonus * value).to(x.dtype)
        gate = self.gate(shifted["gate"], torch.sigmoid)
        new_start = None
        if self._keeps_start:
            assert start is not None
            new_start = layout.last(start, state and state.start)
        last = layout.last(x, state and state.last)
        past = self._past(inputs[1:], state, layout)
        new_state = TimeMixState(last, new_start, matrix, value_state, past)
        return self.output(output * gate), new_state

    @torch.compiler.disable(reason="it loops over chunks and would unroll for each length")
    def _recur(
        self, inputs: list[Tensor], matrix: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """The recurrence, span by span: outputs (B, H, T, Dv) and the last matrices."""
        if layout.is_uniform:
            return rwkv7_recurrence(*inputs, state=matrix if layout.spans[0].seen else None)
        value = inputs[3]
        output = torch.zeros_like(value)
        if matrix is None:
            shape = (*value.shape[:2], value.shape[3], inputs[0].shape[3])
            matrix = value.new_zeros(shape, dtype=accumulator_dtype(value.dtype))
        for span in layout.spans:
            rows = torch.tensor(span.rows, device=value.device)
            parts = [x[rows, :, span.start : span.stop] for x in inputs]
            read, new = rwkv7_recurrence(*parts, state=matrix[rows] if span.seen else None)
            output[rows, :, span.start : span.stop] = read
            matrix = matrix.to(new.dtype).index_copy(0, rows, new)
        return output, matrix

    def _past(
        self, inputs: list[Tensor], state: TimeMixState | None, layout: Layout
    ) -> Replay | None:
        """What it takes to forget the last tokens so far that the record asks for, none of them
        before `state` unless that can forget some."""
        if not layout.record.undo:
            return None
        past = None if state is None else state.past
        if past is None:
            key, value = inputs[1], inputs[2]
            shape = (*value.shape[:2], value.shape[3], key.shape[3])
            zero = value.new_zeros(shape, dtype=accumulator_dtype(value.dtype))
            past = Replay.after(zero if state is None else state.matrix, inputs)
        return past.extended(inputs, layout).limited(layout.record)

    @property
    def _keeps_start(self) -> bool:
        """Whether the next call has to shift x0, too."""
        return self.place.publishes and self.place.layer > 0 and "value" in self.shifts

    def _address(self, shifted: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Receptance, key, removal key, rate and log decay, each (B, H, T, Dk)."""
        heads = self.geometry.num_heads
        precise = accumulator_dtype(shifted["key"].dtype)  # norms, gates and decays, as elsewhere
        key = self.key(shifted["key"]).to(precise)
        rate = torch.sigmoid(self.rate(shifted["rate"]).to(precise))
        removal = F.normalize(split_heads(key * self.removal, heads), dim=-1)
        key = key * (1 + (rate - 1) * self.replacement)
        decay = self.decay(shifted["decay"], torch.tanh).to(precise)
        log_decay = -math.exp(-0.5) * torch.sigmoid(decay)
        receptance = self.receptance(shifted["receptance"]).to(precise)
        receptance, key, rate, log_decay = (
            split_heads(part, heads) for part in (receptance, key, rate, log_decay)
        )
        return receptance, key, removal, rate, log_decay

    def _normalized(self, x: Tensor) -> Tensor:
        """Group norm of each token's heads (B, T, H * Dv)."""
        return self.norm(x.flatten(0, 1)).view_as(x)

    def publish(self, start: Tensor, context: Context, state: TimeMixState | None) -> Tensor:
        if "value" not in self.shifts:
            return self.values.publish(start, start, context)
        last = None
        if state is not None:  # in layer 0 the input is x0
            last = state.last if state.start is None else state.start
        before = context.layout.before(start, last, zero=True)
        return self.values.publish(token_shift(start, self.shifts["value"], before), start, context)

    def state_nbytes_max(self, tokens: int, batch: int, dtype: torch.dtype, undo: int = 0) -> int:
        sizes, precise = self.geometry, accumulator_dtype(dtype).itemsize
        matrix = sizes.key_width * sizes.value_dim * precise
        width = (1 + self._keeps_start) * sizes.hidden_size + self.values.tail_width
        past = 0
        if undo:  # all that the recurrence reads but the receptance
            token = 4 * sizes.key_width * precise + sizes.value_width * dtype.itemsize
            past = matrix + min(undo, tokens) * token
        return batch * (matrix + past + tail_nbytes(width, tokens, dtype, undo))

    def state_like(self, tokens: int, batch: int, dtype: torch.dtype) -> TimeMixState:
        sizes = self.geometry
        shape = (batch, sizes.num_heads, sizes.value_dim, sizes.key_dim)
        matrix = torch.empty(shape, dtype=accumulator_dtype(dtype), device="meta")
        last = tail_like(batch, sizes.hidden_size, dtype)
        assert last is not None
        start = tail_like(batch, sizes.hidden_size * self._keeps_start, dtype)
        return TimeMixState(last, start, matrix, self.values.state_like(batch, dtype), None)

    def flops_by_part(self, tokens: int) -> dict[str, Flops]:
        """See `Mixer.flops_by_part`.

        The recurrence is counted as written, a head and token at a time: `S kk`, the two outer
        products that remove and write, and the read `S r` are 2 Dv Dk each, 8 Dv Dk in all; the
        decay `S diag(w)` is elementwise. The chunked form does more.
        """
        cell = self.geometry.key_width * self.geometry.value_dim  # of all heads
        maps = (self.decay, self.rate, self.gate)
        linears = (self.receptance, self.key, self.output)
        projections = sum((part.flops(tokens) for part in maps), Flops())
        return {
            "attention": products(4 * tokens * cell),
            "projections": sum((linear_flops(x, tokens) for x in linears), projections),
            "values": self.values.flops(tokens),
        }

    def initialize(self, ratio: float) -> None:
        depth = self.place.layer / max(1, self.place.num_layers - 1)  # 0 to 1
        keys = len(self.removal)
        i = torch.arange(keys, dtype=torch.float64, device=self.removal.device) / max(1, keys - 1)
        ramp = i - 0.5
        inside = torch.linspace(-1, 1, self.geometry.key_dim, dtype=torch.float64)
        zigzag = (inside * inside.abs()).repeat(self.geometry.num_heads).to(i)
        for name, mix in self.shifts.items():
            init.copy_(mix, shift_start(mix, INPUTS[name] * ratio))
        self.decay.initialize(-5.5 + 6 * i ** (1 + depth**0.3) + 2.5 * zigzag)
        self.rate.initialize(-0.19 + 0.3 * zigzag + 0.4 * ramp)
        self.gate.initialize()
        init.copy_(self.removal, (0.71 - 0.1 * ramp).to(self.removal))
        init.constant_(self.replacement, 1.02)
        init.constant_(self.bonus, -0.04)
        init.orthogonal_(self.receptance.weight)
        init.orthogonal_(self.key.weight, gain=0.1)
        self._initialize_value_projection()
        self.values.initialize(ratio)
        share = (1 + self.place.layer) / self.place.num_layers
        init.constant_(self.norm.weight, share**0.7)

    def initialize_table(self, inputs, draw, shared):
        """As its own W_V starts: orthogonal, whatever the backbone draws."""

        def orthogonal(*shape: int) -> Tensor:
            return nn.init.orthogonal_(torch.empty(*shape, device=self.bonus.device))

        super().initialize_table(inputs, orthogonal, shared)

    def _initialize_value_projection(self) -> None:
        for name, module in self.values.named_modules():
            if name.rpartition(".")[2] == "projection":
                init.orthogonal_(module.weight)  # pyright: ignore[reportArgumentType]

    @property
    def output_projection(self) -> nn.Linear:
        return self.output
