"""Whole models: tokens a second and peak memory, in training and in serving."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meanbank.benchmarks.ceilings import Probes, probes
from meanbank.benchmarks.limits import Work
from meanbank.benchmarks.peak import peak_bytes
from meanbank.benchmarks.products import products_arm, products_of
from meanbank.benchmarks.records import Effort, Measured, Record, records_of
from meanbank.benchmarks.settings import BUDGETS, DTYPES, SEED, Machine, check_positive
from meanbank.benchmarks.timing import Arm, alternate
from meanbank.core.config import choose
from meanbank.core.progress import progress
from meanbank.memory import Full
from meanbank.memory.kvm import KVM
from meanbank.model import MeanbankCache, MeanbankConfig, MeanbankForCausalLM
from meanbank.model.accounting import flops_by_part
from meanbank.model.backbones import BACKBONES
from meanbank.model.roles import Role, role_of

PHASES = ("training", "passes", "prefill", "decode")
BARE = ": products"  # what the name of an arm's products ends with
MEMORIES = ("full", *BUDGETS)
ARMS = tuple(name for memory in MEMORIES for name in (memory, f"{memory}+bank"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of the models: by default about 10M parameters, without bank tables."""

    backbone: str = "gptalpha2"
    batch: int = 1
    vocabulary: int = 8192
    hidden_size: int = 256
    layers: int = 8
    heads: int = 4
    chunk_size: int = 256

    def __post_init__(self) -> None:
        choose("backbone", self.backbone, BACKBONES)
        for field in dataclasses.fields(self):
            if field.name != "backbone":
                check_positive(field.name, getattr(self, field.name))

    def config(self, arm: str) -> MeanbankConfig:
        """The model of that name: a memory, and `+bank` for a bank in the last third."""
        memory, _, bank = arm.partition("+")
        chosen = Full()
        if memory != "full":
            chosen = KVM(budget=BUDGETS[memory], chunk_size=self.chunk_size)
        plan: list[dict[str, Any]] = [{"memory": chosen}]
        if bank:
            plan.append({"where": "last_third", "values": {"type": "bank"}})
        return MeanbankConfig(
            backbone=self.backbone,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            initialization="plain",
            plan=plan,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBenchmark:
    """What `meanbank bench model` measures.

    Phases: "training", an AdamW step on one sequence of each length; "passes", forward and backward
    alone, beside the matrix products that they are made of; "prefill", reading so many tokens into
    a new cache; "decode", one token after so many, the mean over tokens_decoded consecutive ones.

    Arms: "full", "fixed", "sqrt", "saturating", each also with "+bank".
    """

    machine: Machine = Machine()
    sizes: ModelSizes = ModelSizes()
    effort: Effort = Effort()
    phases: tuple[str, ...] = ("training", "prefill", "decode")
    lengths: tuple[int, ...] = (1024, 8192)
    dtypes: tuple[str, ...] = ("float32",)
    arms: tuple[str, ...] = ("full", "fixed", "sqrt", "full+bank", "fixed+bank", "sqrt+bank")

    def __post_init__(self) -> None:
        for arm in self.arms:
            choose("model", arm, ARMS)
        if "passes" in self.phases and self.machine.device != "cpu":
            raise ValueError("phase passes knows the products of a CPU only; leave out --device")

    @property
    def tokens_decoded(self) -> int:
        """A whole chunk, so that each memory updates once."""
        return self.sizes.chunk_size

    def run(self) -> Iterator[Record]:
        """Yield the records of each cell (dtype, phase, length) when it has been measured."""
        cells = [(d, p, n) for d in self.dtypes for p in self.phases for n in self.lengths]
        with self.machine.settled(), progress("bench model", len(cells)) as report:
            for dtype in self.dtypes:
                models = {arm: self.model(arm, DTYPES[dtype]) for arm in self.arms}
                for phase in self.phases:
                    for length in self.lengths:
                        yield from self.cell(models, dtype, phase, length)
                        report(1, f"{phase} at {length} tokens in {dtype}")

    def model(self, arm: str, dtype: torch.dtype) -> MeanbankForCausalLM:
        """The model of that name."""
        torch.manual_seed(SEED)
        model = MeanbankForCausalLM(self.sizes.config(arm))
        return model.to(self.machine.device, dtype)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def cell(
        self, models: dict[str, MeanbankForCausalLM], dtype: str, phase: str, length: int
    ) -> list[Record]:
        """Measure one phase at one length on all models."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.sizes.batch, length + self.tokens_decoded + 1)
        ids = torch.randint(self.sizes.vocabulary, shape, generator=generator)
        ids = ids.to(self.machine.device)
        arms, extra = {}, {}
        for name, model in models.items():
            arms[name], extra[name] = self.arm(model, phase, ids, length)
            extra[name]["parameters"] = sum(p.numel() for p in model.parameters())
            run = (
                one_token(model, ids, extra[name].pop("cache")) if phase == "decode" else arms[name]
            )
            extra[name]["peak_bytes"] = peak_bytes(lambda run=run: run.run(None), self.machine)
            if phase == "passes":
                products = products_of(lambda run=run: run.run(None))
                extra[name]["product_flops"] = sum(product.flops for product in products)
                arms[name + BARE] = products_arm(products)
        probe = probes(self.machine, DTYPES[dtype])
        common = {"bench": "model", "phase": phase, "length": length, "dtype": dtype}
        return self._measure(models, arms, extra, common, probe)

    def _measure(
        self,
        models: dict[str, MeanbankForCausalLM],
        arms: dict[str, Arm],
        extra: dict[str, Record],
        common: Record,
        probe: Probes,
    ) -> list[Record]:
        timings = alternate(
            {**probe.arms, **arms},
            self.machine,
            rounds=self.effort.rounds,
            seconds=self.effort.seconds,
            warm_up=common["phase"] != "decode",
        )
        phase, length = common["phase"], common["length"]
        tokens = self.sizes.batch * (1 if phase == "decode" else length)
        measured = []
        for name, model in models.items():
            seconds = timings[name].seconds(self.machine.clock)
            speed = {"tokens_per_second": tokens / seconds}
            sizes = dataclasses.asdict(self.sizes)
            if name + BARE in timings:
                bare = timings[name + BARE].seconds(self.machine.clock)
                extra[name] |= {"product_seconds": bare, "share_of_products": bare / seconds}
            measured.append(
                Measured(
                    arm=name,
                    budget=None,
                    timing=timings[name],
                    work=self.work(model, phase, length, extra[name].get("state_bytes", 0)),
                    extra={**sizes, **speed, **extra[name]},
                )
            )
        ceilings = probe.ceilings(timings, self.machine.clock)
        return records_of(common, measured, ceilings, self.machine, baselines=("sdpa", "full"))

    def arm(
        self, model: MeanbankForCausalLM, phase: str, ids: Tensor, length: int
    ) -> tuple[Arm, Record]:
        """What is timed, and what its record says besides."""
        if phase == "training":
            return training_arm(model, ids[:, :length]), {}
        if phase == "passes":
            return passes_arm(model, ids[:, :length]), {}
        model.eval()
        if phase == "prefill":
            return prefill_arm(model, ids[:, :length]), {}
        cache: Any = model.prefill(ids[:, :length]).cache
        extra = {"state_bytes": cache.nbytes(), "cache": cache}
        return self._decode_arm(model, cache, ids, length), extra

    def _decode_arm(
        self, model: MeanbankForCausalLM, cache: MeanbankCache, ids: Tensor, length: int
    ) -> Arm:
        tokens = ids[:, length:].split(1, dim=1)

        @torch.inference_mode()
        def prepare() -> MeanbankCache:
            fresh = cache.repeat(1)
            model(tokens[0], cache=fresh)  # a state that decoding left
            return fresh

        @torch.inference_mode()
        def run(fresh: MeanbankCache) -> None:
            for token in tokens[1:]:
                model(token, cache=fresh)

        return Arm(run=run, prepare=prepare, steps=len(tokens) - 1)

    def work(self, model: MeanbankForCausalLM, phase: str, length: int, state: int) -> Work:
        """FLOPs and bytes; bytes of a decoded token: all weights but tables, and the state."""
        weights = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if role_of(name, parameter) not in (Role.TABLE, Role.EMBEDDING)
        )

        def flops(tokens: int) -> tuple[int, int]:
            parts = flops_by_part(model, tokens)
            return sum(p.forward for p in parts.values()), sum(p.total for p in parts.values())

        batch = self.sizes.batch
        if phase in ("training", "passes"):
            return Work(batch * flops(length)[1], weights)
        if phase == "prefill":
            head = 2 * self.sizes.hidden_size * self.sizes.vocabulary * (length - 1)
            return Work(batch * (flops(length)[0] - head), weights)  # logits of the last token only
        stop = length + self.tokens_decoded
        each = (flops(stop)[0] - flops(length)[0]) / self.tokens_decoded
        return Work(batch * each, weights + state)


def one_token(model: MeanbankForCausalLM, ids: Tensor, cache: MeanbankCache) -> Arm:
    """One decode step, for its peak: the new state beside the old one."""
    fresh = cache.repeat(1)

    @torch.inference_mode()
    def run(_: Any) -> None:
        model(ids[:, cache.seen : cache.seen + 1], cache=fresh)

    return Arm(run=run)


def training_arm(model: MeanbankForCausalLM, ids: Tensor) -> Arm:
    """Forward, backward and AdamW; gradients are dropped in between, as in a training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run(_: Any) -> None:
        model.train()
        backward(model, ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run(None)  # the optimizer's own state is there before anything is measured
    return Arm(run=run)


def passes_arm(model: MeanbankForCausalLM, ids: Tensor) -> Arm:
    """Forward and backward."""

    def run(_: Any) -> None:
        model.train()
        backward(model, ids)
        model.zero_grad(set_to_none=True)

    return Arm(run=run)


def backward(model: MeanbankForCausalLM, ids: Tensor) -> None:
    """Gradients of the mean loss, as `meanbank train` takes them."""
    (model(ids, targets=ids, use_cache=False).loss / ids.numel()).backward()


def prefill_arm(model: MeanbankForCausalLM, ids: Tensor) -> Arm:
    """Read a prompt at once, into a new cache; logits of its last token."""

    @torch.inference_mode()
    def run(_: Any) -> MeanbankCache:
        cache = model.model.new_cache()
        model(ids, cache=cache, logits_to_keep=1)
        return cache

    return Arm(run=run)
