"""A bank layer's whole decode step: ids stored and values looked up, against values cached."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.benchmarks.ceilings import probes
from meanbank.benchmarks.decode import Decoder, decode_arm, offsets
from meanbank.benchmarks.limits import Work
from meanbank.benchmarks.records import Effort, Measured, Record, records_of, sizes_of
from meanbank.benchmarks.settings import BUDGETS, DTYPES, SEED, Machine, Sizes, check_room
from meanbank.benchmarks.timing import alternate
from meanbank.core.context import Context
from meanbank.core.flops import Flops
from meanbank.core.layout import Layout
from meanbank.core.progress import progress
from meanbank.core.values import DenseValues
from meanbank.memory import Full, MemoryConfig
from meanbank.memory.kvm import KVM
from meanbank.model import MeanbankConfig
from meanbank.model.attention import SoftmaxAttention
from meanbank.values import ValueSource

MEMORIES = ("full", *BUDGETS)
ARMS = ("bank", "cached", "projected")
BANK: dict[str, Any] = {"type": "bank"}
PROJECTED: dict[str, Any] = {"type": "projection", "residual": "none", "shift": "none"}


class StoredDense(ValueSource):
    """Another source's values, stored as they are, whatever that source would store."""

    def __init__(self, source: ValueSource) -> None:
        super().__init__(source.geometry, source.place)
        self.source = source

    def forward(self, x, start, context, state):
        values, state = self.source(x, start, context, state)
        return DenseValues(values.dense()), state

    def publish(self, x: Tensor, start: Tensor, context: Context) -> Tensor:
        return self.source.publish(x, start, context)

    def forward_flops(self, tokens: int) -> Flops:
        return self.source.forward_flops(tokens)

    def publish_flops(self, tokens: int) -> Flops:
        return self.source.publish_flops(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankBenchmark:
    """What `meanbank bench bank` measures: one attention layer, its projections included.

    Arms: "bank" stores token ids and takes values from its table; "cached" is the same layer with
    the values in its state; "projected" has a value projection in place of a bank. vocabulary:
    rows of a table; token ids follow Zipf's law. Every one of the `sizes.layers` layers that
    decoding goes round has weights and a table of its own.
    """

    machine: Machine = Machine()
    sizes: Sizes = Sizes()
    effort: Effort = Effort()
    lengths: tuple[int, ...] = (2048, 8192)
    memories: tuple[str, ...] = ("full", "sqrt")
    dtypes: tuple[str, ...] = ("float32",)
    arms: tuple[str, ...] = ARMS
    vocabulary: int = 32768

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise ValueError(f"vocabulary must be positive, got {self.vocabulary}")
        self._check_room()

    def run(self) -> Iterator[Record]:
        """Yield the records of each cell (dtype, memory, length) when it has been measured."""
        cells = [(d, m, n) for d in self.dtypes for m in self.memories for n in self.lengths]
        with self.machine.settled(), progress("bench bank", len(cells)) as report:
            for dtype, memory, length in cells:
                yield from self.cell(dtype, memory, length)
                report(1, f"{memory} after {length} tokens in {dtype}")

    def cell(self, dtype: str, memory: str, length: int) -> list[Record]:
        """Measure the decode step of one memory after `length` tokens."""
        decoders = self.decoders(dtype, memory, length)
        arms = {name: decode_arm(decoder, self.sizes) for name, decoder in decoders.items()}
        probe = probes(self.machine, DTYPES[dtype])
        timings = alternate(
            {**probe.arms, **arms},
            self.machine,
            rounds=self.effort.rounds,
            seconds=self.effort.seconds,
            warm_up=False,
        )
        common = {"bench": "bank", "phase": "decode", "length": length, "dtype": dtype}
        measured = [
            Measured(
                arm=name,
                budget=memory,
                timing=timings[name],
                work=decoder.work(),
                extra={
                    **sizes_of(self.sizes),
                    "vocabulary": self.vocabulary,
                    "state_bytes": decoder.nbytes,
                    "table_rows_read": decoder.table_rows if name == "bank" else 0,
                },
            )
            for name, decoder in decoders.items()
        ]
        ceilings = probe.ceilings(timings, self.machine.clock)
        return records_of(
            common, measured, ceilings, self.machine, baselines=("sdpa", "cached", "projected")
        )

    def decoders(self, dtype: str, memory: str, length: int) -> "dict[str, BankDecoder]":
        """One for each arm; "bank" and "cached" share weights and tables."""
        kind, made = DTYPES[dtype], {}
        banked = self._layers(memory, BANK, kind) if set(self.arms) & {"bank", "cached"} else []
        for name in self.arms:
            layers = banked
            if name == "cached":
                layers = [self._with_stored_values(layer, memory) for layer in banked]
            elif name == "projected":
                layers = self._layers(memory, PROJECTED, kind)
            made[name] = BankDecoder(self, layers, length, kind)
        return made

    def _check_room(self) -> None:
        """Raise ValueError where tables and full caches, with new ones beside them, cannot fit."""
        if "full" not in self.memories or self.machine.device != "cpu":
            return
        sizes, widest = self.sizes, max(DTYPES[dtype].itemsize for dtype in self.dtypes)
        rows = {"bank": 1, "cached": 2, "projected": 2}  # keys, or keys and values
        held = [rows[arm] * sizes.batch * max(self.lengths) for arm in self.arms]
        tables = self.vocabulary * (set(self.arms) != {"projected"})
        width = sizes.layers * sizes.heads * sizes.head_dim * widest
        what = f"decode at {max(self.lengths)} tokens in {sizes.layers} layers with full attention"
        check_room((sum(held) + max(held) + tables) * width, what)

    def _layers(
        self, memory: str, values: dict[str, Any], dtype: torch.dtype
    ) -> list[SoftmaxAttention]:
        """As many layers as decoding goes round."""
        config = self._config(memory, values)
        places = zip(config.plans(), config.places(), strict=True)
        parts = ((plan, config.geometry(plan), place) for plan, place in places)
        layers = [SoftmaxAttention(*part, config.backbone_parts) for part in parts]
        for layer in layers:
            _start_values(layer)
            layer.to(self.machine.device, dtype).eval()
        return layers

    def _config(self, memory: str, values: dict[str, Any]) -> MeanbankConfig:
        chunk = self.sizes.chunk_size
        chosen: MemoryConfig = Full()
        if memory != "full":
            chosen = KVM(budget=BUDGETS[memory], chunk_size=chunk)
        return MeanbankConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.sizes.heads * self.sizes.head_dim,
            num_hidden_layers=self.sizes.layers,
            num_attention_heads=self.sizes.heads,
            plan=[{"memory": chosen, "values": values}],
        )

    def _with_stored_values(self, layer: SoftmaxAttention, memory: str) -> SoftmaxAttention:
        """The same layer, parameters shared, whose memory stores values."""
        config = self._config(memory, BANK)
        plan = config.plans()[0]
        with torch.device("meta"):  # replaced below
            twin = SoftmaxAttention(plan, layer.geometry, layer.place, config.backbone_parts)
        twin.address, twin.memory, twin.output = layer.address, layer.memory, layer.output
        twin.values = StoredDense(layer.values)
        return twin.eval()


def _start_values(layer: nn.Module) -> None:
    """Small normal numbers everywhere, ones in norms: speed does not depend on them."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)


class BankDecoder(Decoder):
    """Layers after a context that the first of them has read; each goes on with its own weights."""

    @torch.inference_mode()
    def __init__(
        self,
        bench: BankBenchmark,
        layers: list[SoftmaxAttention],
        context: int,
        dtype: torch.dtype,
    ) -> None:
        self.layers, self.context, self.sizes = layers, context, bench.sizes
        batch, width = self.sizes.batch, self.sizes.heads * self.sizes.head_dim
        chunk, device = self.sizes.chunk_size, bench.machine.device
        generator = torch.Generator(device).manual_seed(SEED)
        total = context + chunk + 1
        stream = torch.randn(batch, total, width, generator=generator, device=device).to(dtype)
        ids = zipf(bench.vocabulary, batch * total).view(batch, total).to(device)
        self.inputs = [
            (stream[:, at : at + 1].contiguous(), ids[:, at : at + 1].contiguous())
            for at in range(context, total)
        ]
        _, state = self._read(layers[0], stream[:, :context], ids[:, :context], 0, None)
        self.nbytes = state.nbytes()
        self.states = []
        for offset in offsets(chunk, self.sizes.layers):
            further = state
            if offset:
                part = slice(context, context + offset)
                _, further = self._read(layers[0], stream[:, part], ids[:, part], context, state)
            self.states.append(further.map(torch.clone))
        self.table_rows = self._distinct_rows(ids[:, :context])

    def _read(
        self, layer: SoftmaxAttention, x: Tensor, ids: Tensor, seen: int, state: Any
    ) -> tuple[Tensor, Any]:
        layout = Layout.uniform(x.shape[0], seen, x.shape[1])
        return layer(x, None, Context(ids, x, layout), state)

    def _distinct_rows(self, ids: Tensor) -> int:
        """Rows of its table that a query needs at least: those of the ids that the state holds."""
        held = self.context
        exact = self.layers[0].memory.exact_tokens
        if exact is not None:
            held = min(held, exact)
        return len(ids[:, -held:].unique())

    def start(self) -> list[Any]:
        return list(self.states)

    def step(self, state: Any, layer: int, token: int) -> tuple[Tensor, Any]:
        x, ids = self.inputs[token]
        return self._read(self.layers[layer], x, ids, self.context + token, state)

    def work(self) -> Work:
        """Of a token: the layer's weights, its state and the table rows needed, each once."""
        layer, chunk = self.layers[0], self.sizes.chunk_size
        table_names = ("values.table", "values.source.table")
        weights = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in layer.named_parameters()
            if name not in table_names
        )
        rows = 0
        if layer.values.stores_token_ids:
            table = layer.get_parameter("values.table")
            rows = self.table_rows * table.shape[1] * table.element_size()
        state = sum(state.nbytes() for state in self.states) / len(self.states)
        flops = layer.flops(self.context + chunk).forward - layer.flops(self.context).forward
        return Work(flops * self.sizes.batch / chunk, weights + state + rows)


def zipf(vocabulary: int, count: int) -> Tensor:
    """Token ids (count,) whose frequencies fall as 1 / rank, ranks in random order."""
    generator = torch.Generator().manual_seed(SEED)
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    ranks = torch.multinomial(weights, count, replacement=True, generator=generator)
    return torch.randperm(vocabulary, generator=generator)[ranks]
