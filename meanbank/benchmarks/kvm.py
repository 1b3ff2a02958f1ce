"""The operator: KVM attention against full attention, in whole passes, backward and decode."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meanbank.benchmarks.ceilings import Probes, probes
from meanbank.benchmarks.decode import Decoder, decode_arm, decoder_of
from meanbank.benchmarks.full_attention import full, full_forward
from meanbank.benchmarks.limits import PHASES, work
from meanbank.benchmarks.operands import Operands, kvm, sdpa
from meanbank.benchmarks.peak import peak_bytes
from meanbank.benchmarks.records import Effort, Measured, Record, records_of, sizes_of
from meanbank.benchmarks.settings import DTYPES, Machine, Sizes, check_room
from meanbank.benchmarks.timing import Arm, Timing, alternate
from meanbank.core.progress import progress
from meanbank.ops.kvm.api import BACKENDS

ARMS = ("ours", *BACKENDS, "sdpa", "full")
Key = tuple[str, str | None]  # arm and budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVMBenchmark:
    """What `meanbank bench kvm` measures.

    Arms: "ours", the operator's default backend; any backend by its name, such as "reference", the
    specification; "sdpa", PyTorch's own attention; "full", the best full attention that we found
    in plain PyTorch.
    """

    machine: Machine = Machine()
    sizes: Sizes = Sizes()
    effort: Effort = Effort()
    phases: tuple[str, ...] = PHASES
    lengths: tuple[int, ...] = (512, 2048, 8192)
    budgets: tuple[str, ...] = ("fixed", "sqrt")
    dtypes: tuple[str, ...] = ("float32",)
    arms: tuple[str, ...] = ("ours", "reference", "sdpa", "full")

    def __post_init__(self) -> None:
        self._check_room()

    def run(self) -> Iterator[Record]:
        """Yield the records of each cell (dtype, phase, length) when it has been measured."""
        cells = [(d, p, n) for d in self.dtypes for p in self.phases for n in self.lengths]
        with self.machine.settled(), progress("bench kvm", len(cells)) as report:
            for dtype, phase, length in cells:
                report(0, f"{phase} of {length} tokens in {dtype}")
                yield from self.cell(dtype, phase, length)
                report(1, f"{phase} of {length} tokens in {dtype}")

    def keys(self) -> list[Key]:
        """The arms, with each budget those that have one."""
        return [
            (arm, budget)
            for arm in self.arms
            for budget in ((None,) if arm in ("sdpa", "full") else self.budgets)
        ]

    def cell(self, dtype: str, phase: str, length: int) -> list[Record]:
        """Measure one phase on `length` tokens (decode: after them)."""
        kind, further = DTYPES[dtype], self.sizes.chunk_size + 1 if phase == "decode" else 0
        operands = Operands.random(self.sizes, length + further, kind, self.machine.device)
        arms, extra = {}, {}
        if phase == "decode":
            for key in self.keys():
                decoder = decoder_of(operands, length, self.sizes, self.machine, *key)
                arms[key], extra[key] = decode_arm(decoder, self.sizes), _about(decoder)
        else:
            for key in self.keys():
                if phase == "prefill":
                    arms[key] = prefill_arm(operands, self.sizes, *key)
                    extra[key] = {}
                else:
                    arms[key] = backward_arm(operands, self.sizes, *key)
                    extra[key] = {"peak_bytes": self._training_peak(arms[key])}
        common = {"bench": "kvm", "phase": phase, "length": length, "dtype": dtype}
        return self.measure(arms, extra, common, probes(self.machine, kind))

    def measure(
        self, arms: dict[Key, Arm], extra: dict[Key, Any], common: Record, ceilings: Probes
    ) -> list[Record]:
        """Time the arms and the ceilings in turns."""
        timings: dict[Any, Timing] = alternate(
            {**ceilings.arms, **arms},
            self.machine,
            rounds=self.effort.rounds,
            seconds=self.effort.seconds,
            warm_up=common["phase"] != "decode",
        )
        phase, length, kind = common["phase"], common["length"], DTYPES[common["dtype"]]
        measured = [
            Measured(
                arm=arm,
                budget=budget,
                timing=timings[arm, budget],
                work=work(phase, self.sizes, budget, length, kind),
                extra={**sizes_of(self.sizes), **extra[arm, budget]},
            )
            for arm, budget in arms
        ]
        rates = ceilings.ceilings(timings, self.machine.clock)
        return records_of(common, measured, rates, self.machine)

    def _training_peak(self, arm: Arm) -> int:
        """Bytes above the inputs in forward and backward together, the gradients included."""
        return peak_bytes(lambda: arm.run(arm.prepare()), self.machine)

    def _check_room(self) -> None:
        """Raise ValueError where the caches that decoding goes round cannot fit the memory."""
        if "decode" not in self.phases or self.machine.device != "cpu":
            return
        caches = sum(arm in ("sdpa", "full") for arm in self.arms)
        widest = max(DTYPES[dtype].itemsize for dtype in self.dtypes)
        row = 2 * self.sizes.batch * self.sizes.heads * self.sizes.head_dim * widest
        needed = caches * self.sizes.layers * (max(self.lengths) + self.sizes.chunk_size) * row
        what = f"decode at {max(self.lengths)} tokens"
        check_room(needed, f"{what}, with {self.sizes.layers} layers' full caches,")


def _about(decoder: Decoder) -> Record:
    """What a record says of a decoder."""
    layouts = getattr(decoder, "layouts", None)
    extra: Record = {"state_bytes": decoder.nbytes}
    if layouts is not None:
        extra["layouts"] = [layout.__name__ for layout in layouts]
    return extra


def attend(operands: Operands, sizes: Sizes, arm: str, budget: str | None) -> Tensor:
    """The whole pass of an arm, with gradients where they are wanted: (B, H, T, D)."""
    if arm == "sdpa":
        return sdpa(operands)
    if arm == "full":
        query, key, value = operands.query, operands.key, operands.value
        if query.requires_grad:
            return full(query, key, value)
        flat = full_forward(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
        return flat.view_as(value)
    assert budget is not None
    return kvm(operands, sizes, budget, "auto" if arm == "ours" else arm)[0]


def prefill_arm(operands: Operands, sizes: Sizes, arm: str, budget: str | None) -> Arm:
    """A pass over all tokens without gradients; KVM also leaves its memory."""

    @torch.inference_mode()
    def run(_: Any) -> Tensor:
        return attend(operands, sizes, arm, budget)

    return Arm(run=run)


def backward_arm(operands: Operands, sizes: Sizes, arm: str, budget: str | None) -> Arm:
    """The backward pass of a forward that is made anew, untimed, before each run."""
    generator = torch.Generator(operands.value.device).manual_seed(1)
    shape, device = operands.value.shape, operands.value.device
    gradient = torch.randn(shape, generator=generator, device=device).to(operands.value.dtype)

    def prepare() -> tuple[Tensor, list[Tensor]]:
        leaves = operands.leaves()
        output = attend(leaves, sizes, arm, budget)
        exact = budget is None
        wanted = [leaves.query, leaves.key, leaves.value] if exact else [*leaves.tensors()]
        return output, wanted

    def run(prepared: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, ...]:
        output, wanted = prepared
        return torch.autograd.grad(output, wanted, gradient, allow_unused=True)

    return Arm(run=run, prepare=prepare)
