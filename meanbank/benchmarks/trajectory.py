"""The time of every generated token, from the second to the last: the paper's decode series.

One layer an arm. The arms take turns token by token, a different one first each time, so each
begins with what the others have left in the caches; updates of KVM's memory fall on the token that
makes them.
"""

import dataclasses
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from meanbank.benchmarks.ceilings import probes
from meanbank.benchmarks.full_decode import FullCache, fastest_layouts
from meanbank.benchmarks.kvm import ARMS, Key
from meanbank.benchmarks.limits import Work, rows_read
from meanbank.benchmarks.operands import Operands, flash, kvm
from meanbank.benchmarks.records import Measured, Record, records_of, sizes_of
from meanbank.benchmarks.settings import DTYPES, Machine, Sizes
from meanbank.benchmarks.timing import Timing, alternate
from meanbank.core.flops import Flops
from meanbank.core.progress import progress
from meanbank.memory import Full

BUCKETS_PER_DOUBLING = 4


@dataclasses.dataclass(kw_only=True)
class TrajectoryBenchmark:
    """What `meanbank bench trajectory` measures.

    tokens: generated, from an empty context. times: (tokens since the first, arm and budget) ->
    (CPU seconds, wall seconds), filled as it runs.
    """

    machine: Machine = Machine()
    sizes: Sizes = Sizes()
    tokens: int = 8192
    budgets: tuple[str, ...] = ("fixed", "sqrt")
    dtype: str = "float32"
    arms: tuple[str, ...] = ("ours", "sdpa", "full")
    times: dict[Key, list[tuple[float, float]]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"tokens must be at least 2, got {self.tokens}")
        assert set(self.arms) <= set(ARMS)
        keys: list[Key] = []
        for arm in self.arms:
            budgets: tuple[str | None, ...] = self.budgets
            keys += [(arm, b) for b in ((None,) if arm in ("sdpa", "full") else budgets)]
        self.times = {key: [] for key in keys}

    def run(self) -> Iterator[Record]:
        """Yield the records of each stretch of tokens, as soon as it has been generated.

        A stretch is a quarter of a doubling; its time is the mean over its tokens, and `length`
        its last position.
        """
        with self.machine.settled(), progress("bench trajectory", self.tokens) as report:
            kind = DTYPES[self.dtype]
            probe = probes(self.machine, kind)
            timings = alternate(probe.arms, self.machine, rounds=5, seconds=5.0)
            ceilings = probe.ceilings(timings, self.machine.clock)
            operands = Operands.random(self.sizes, self.tokens, kind, self.machine.device)
            steppers = {key: self._stepper(operands, *key) for key in self.times}
            stops = {stop: start for start, stop in stretches(self.tokens)}
            for at in range(self.tokens):
                token = operands.tokens(at, at + 1)[0]
                first = at % len(steppers)  # whoever is first pays for what the loop did before
                for key in [*self.times][first:] + [*self.times][:first]:
                    self.times[key].append(self._timed(steppers[key], token, at))
                report(1, f"{at + 1} tokens")
                if at + 1 in stops:
                    measured = [self._stretch(key, stops[at + 1], at + 1) for key in self.times]
                    common = {"bench": "trajectory", "phase": "decode", "length": at + 1}
                    yield from records_of(
                        {**common, "dtype": self.dtype}, measured, ceilings, self.machine
                    )

    def csv(self) -> str:
        """CPU and wall seconds of every token so far, a line each; the first token is number 1."""
        names = [f"{arm}{f'_{budget}' if budget else ''}" for arm, budget in self.times]
        lines = [",".join(["token", *(f"{n}_{clock}" for n in names for clock in ("cpu", "wall"))])]
        for at, row in enumerate(zip(*self.times.values(), strict=False)):
            lines.append(",".join([str(at + 1), *(f"{x:.9f}" for pair in row for x in pair)]))
        return "\n".join(lines) + "\n"

    def _timed(self, stepper: Any, token: Operands, at: int) -> tuple[float, float]:
        self.machine.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        stepper(token, at)
        self.machine.synchronize()
        return time.process_time() - cpu, time.perf_counter() - wall

    def _stretch(self, key: Key, start: int, stop: int) -> Measured:
        """The mean over the tokens at positions [start, stop)."""
        arm, budget = key
        part = self.times[key][start:stop]
        cpu, wall = (sum(column) / len(part) for column in zip(*part, strict=True))
        return Measured(
            arm=arm,
            budget=budget,
            timing=Timing((cpu,), (wall,)),
            work=self._work(budget, start, stop),
            extra={**sizes_of(self.sizes), "layers": 1, "first": start + 1, "tokens": len(part)},
        )

    def _work(self, budget: str | None, start: int, stop: int) -> Work:
        """Mean work of a token at the positions [start, stop)."""
        config = Full() if budget is None else self.sizes.memory(budget)
        memory = config.build(self.sizes.geometry)
        row = 2 * self.sizes.heads * self.sizes.head_dim * DTYPES[self.dtype].itemsize
        before = memory.flops(start) if start else Flops()
        scale = self.sizes.batch / (stop - start)
        rows = sum(rows_read(memory, tokens) for tokens in range(start + 1, stop + 1))
        return Work((memory.flops(stop).forward - before.forward) * scale, rows * row * scale)

    def _stepper(self, operands: Operands, arm: str, budget: str | None):
        """A function of one token (1 position) and its place that decodes it."""
        if arm == "sdpa":
            return _sdpa_stepper(operands)
        if arm == "full":
            return self._full_stepper(operands)
        assert budget is not None
        name, backend, memory = budget, "auto" if arm == "ours" else arm, None

        @torch.inference_mode()
        def step(token: Operands, at: int) -> None:
            nonlocal memory
            _, memory = kvm(token, self.sizes, name, backend, memory)

        return step

    def _full_stepper(self, operands: Operands):
        with torch.inference_mode():
            key, value = operands.key.flatten(0, 1), operands.value.flatten(0, 1)
            layouts = fastest_layouts(key, value, self.machine.synchronize)
            cache = FullCache(key[:, :0], value[:, :0], key.shape[1], layouts)

        @torch.inference_mode()
        def step(token: Operands, at: int) -> None:
            query, key, value = (
                x.flatten(0, 1)[:, 0] for x in (token.query, token.key, token.value)
            )
            cache.step(query, key, value, at)

        return step


def _sdpa_stepper(operands: Operands):
    key, value = torch.zeros_like(operands.key), torch.zeros_like(operands.value)

    @torch.inference_mode()
    def step(token: Operands, at: int) -> None:
        key[:, :, at], value[:, :, at] = token.key[:, :, 0], token.value[:, :, 0]
        with flash(token.query):
            torch.nn.functional.scaled_dot_product_attention(
                token.query, key[:, :, : at + 1], value[:, :, : at + 1]
            )

    return step


def stretches(tokens: int) -> list[tuple[int, int]]:
    """Positions [start, stop) to average: from the second token on, by quarters of doublings."""
    bounds, exponent = [1], 2 * BUCKETS_PER_DOUBLING
    while bounds[-1] < tokens:
        bound = round(2 ** (exponent / BUCKETS_PER_DOUBLING))
        if bound > bounds[-1]:
            bounds.append(min(bound, tokens))
        exponent += 1
    return list(pairwise(bounds))
