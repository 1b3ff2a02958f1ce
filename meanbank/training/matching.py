"""What makes one run comparable with another: equal parameters, tokens, FLOPs or memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from meanbank.core.config import build, choose
from meanbank.memory import MemoryConfig
from meanbank.training.config import RunConfig, load_config
from meanbank.training.planning import (
    Convention,
    model_of,
    nearest_steps,
    training_flops,
    training_tokens,
)

By = Literal["params", "tokens", "flops"]
Measure = Callable[[RunConfig], float]
Load = Callable[[Sequence[str]], RunConfig]
LARGEST = 1 << 20  # of a size that is tried
DEEPEST = 1024  # layers: nobody wants a proposal beyond, and building them takes minutes
FINEST = 0.001  # steps of a size that is no integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings that bring a run near another one.

    setting: what is changed; overrides: the arguments of `--set`; ours, theirs: parameters, tokens,
    training FLOPs or bytes of both, once they are set; difference_percent: by how much ours exceed.
    """

    setting: str
    overrides: tuple[str, ...]
    ours: float
    theirs: float
    difference_percent: float


def match(
    name: str,
    other: str,
    by: By,
    overrides: Sequence[str] = (),
    convention: Convention = "exact",
) -> list[Proposal]:
    """`proposals` for configuration `name` (with overrides), to be comparable with `other`."""

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(name, [*overrides, *more])

    return proposals(load, load_config(other), by, convention)


def proposals(
    load: Load, reference: RunConfig, by: By, convention: Convention = "exact"
) -> list[Proposal]:
    """Changes that make a configuration comparable with `reference`; `load` gives it with changes.

    by "params": the hidden_size (same depth) and the depth (same hidden_size) whose number of
    parameters comes nearest, where the plan allows others (one that lists layers by number keeps
    its lists); "tokens" and "flops": the steps. Raises ValueError where nothing can be changed.
    """
    config = load(())
    if choose("by", by, ("params", "tokens", "flops")) != "params":
        return [_steps(load, reference, by, convention)]
    theirs = num_parameters(reference)
    found = [_width(load, config, theirs), _depth(load, config, theirs)]
    proposals = [proposal for proposal in found if proposal is not None]
    if not proposals:
        raise ValueError("neither its hidden_size nor its num_hidden_layers can be changed")
    return proposals


def memory_proposal(
    load: Load, settings: dict[str, Any], reference: RunConfig, tokens: int
) -> Proposal:
    """The size of its layers' memories at which a model holds as many bytes as `reference`.

    settings: what `load` builds from, where the plan stands as it was written; tokens: after how
    many the bytes are compared, of one sequence. Memories without a size (full attention, RWKV-7)
    stay, and so do windows beside memories with a budget; the others must have one size, since one
    number is changed. Raises ValueError where that is not so.
    """
    theirs = memory_nbytes(reference, tokens)
    places, memory = _sized_memories(settings["model"])
    setting = memory.size_setting
    assert setting is not None
    value = functools.reduce(getattr, setting.split("."), memory)
    whole = isinstance(value, int)

    def overrides(size: int) -> tuple[str, ...]:
        number = size if whole else round(size * FINEST, 3)
        return tuple(f"{place}.{setting}={number}" for place in places)

    start = value if whole else round(value / FINEST)
    load(overrides(start))  # raises where the settings leave open what is to be changed
    measure = functools.partial(memory_nbytes, tokens=tokens)
    found = _nearest(setting, load, overrides, start, theirs, measure=measure)
    if found is None:
        raise ValueError(f"no {setting} makes it hold {theirs:,} bytes after {tokens:,} tokens")
    return found


def _sized_memories(model: dict[str, Any]) -> tuple[list[str], Any]:
    """Where the settings of a model say that a layer has a memory with a size; and that memory."""
    kind = "plan" if model.get("layers") is None else "layers"
    sized: dict[str, Any] = {}
    for number, rule in enumerate(model.get(kind) or []):
        memory = build(MemoryConfig, rule["memory"]) if "memory" in rule else None
        if memory is not None and memory.size_setting is not None:
            sized[f"model.{kind}.{number}.memory"] = memory
    budgeted = {
        place: memory for place, memory in sized.items() if memory.rows_wanted(1) is not None
    }
    sized = budgeted or sized
    if not sized:
        raise ValueError("its model.plan names no memory with a size that could be changed")
    if len(set(sized.values())) > 1:
        raise ValueError("its memories have several sizes, and one number is to be changed")
    return list(sized), next(iter(sized.values()))


def memory_nbytes(config: RunConfig, tokens: int) -> int:
    """Bytes, at most, that a run's model remembers of one sequence of `tokens` tokens."""
    backbone: Any = model_of(config).model
    return backbone.memory_nbytes_max(tokens)


def num_parameters(config: RunConfig) -> int:
    """Parameters of a run's model."""
    return sum(parameter.numel() for parameter in model_of(config).parameters())


def _steps(load: Load, reference: RunConfig, by: By, convention: Convention) -> Proposal:
    def cost(of: RunConfig) -> float:
        """Of a whole run."""
        if by == "tokens":
            return training_tokens(of)
        return training_flops(model_of(of), of, convention)

    config, theirs, overrides = load(()), cost(reference), ()
    for _ in range(2):  # a step's share of a curriculum depends a little on their number
        steps = nearest_steps(theirs, cost(config) / config.training.steps)
        overrides = (f"training.steps={steps}",)
        config = load(overrides)  # raises where another setting forbids it
    return _proposal("steps", overrides, cost(config), theirs)


def _proposal(setting: str, overrides: tuple[str, ...], ours: float, theirs: float) -> Proposal:
    return Proposal(
        setting=setting,
        overrides=overrides,
        ours=ours,
        theirs=theirs,
        difference_percent=100 * (ours / theirs - 1),
    )


def _width(load: Load, config: RunConfig, theirs: int) -> Proposal | None:
    """The nearest hidden_size, a multiple of twice the heads; the MLP's width follows it."""
    unit = 2 * config.model["num_attention_heads"]

    def overrides(units: int) -> tuple[str, ...]:
        width = units * unit
        change = f"model.hidden_size={width}"
        intermediate = _intermediate_size(config, width)
        if load([change]).model["intermediate_size"] == intermediate:
            return (change,)
        return change, f"model.intermediate_size={intermediate}"

    return _nearest("hidden_size", load, overrides, config.model["hidden_size"] // unit, theirs)


def _depth(load: Load, config: RunConfig, theirs: int) -> Proposal | None:
    """The nearest number of layers."""

    def overrides(layers: int) -> tuple[str, ...]:
        return (f"model.num_hidden_layers={layers}",)

    start = config.model["num_hidden_layers"]
    return _nearest("num_hidden_layers", load, overrides, start, theirs, DEEPEST)


def _intermediate_size(config: RunConfig, width: int) -> int:
    """The MLP's width at another hidden_size: in proportion, rounded down to a multiple of 32."""
    old_width, old = config.model["hidden_size"], config.model["intermediate_size"]
    ratio = 4 if old == max(32, 4 * old_width // 32 * 32) else old / old_width
    return max(32, int(ratio * width) // 32 * 32)


def _nearest(
    setting: str,
    load: Load,
    overrides: Callable[[int], tuple[str, ...]],
    start: int,
    theirs: float,
    largest: int = LARGEST,
    measure: Measure = num_parameters,
) -> Proposal | None:
    """The size, counted from 1, whose measure comes nearest; None where it cannot be set."""

    @functools.cache
    def measured(size: int) -> float | None:
        try:
            return measure(load(overrides(size)))
        except ValueError:  # a plan may name layers that a model of fewer does not have
            return None

    low, high = 0, max(1, start)
    while (count := measured(high)) is not None and count < theirs:
        low, high = high, 2 * high
        if high > largest:
            return None
    while high - low > 1:  # it grows with the size; what cannot be set is too small
        middle = (low + high) // 2
        count = measured(middle)
        low, high = (middle, high) if count is None or count < theirs else (low, middle)
    at_low, at_high = (measured(size) if size else 0 for size in (low, high))
    if at_low is None or at_high is None:  # what would be nearest may be what cannot be set
        return None
    size, ours = (high, at_high)
    if low and theirs - at_low <= at_high - theirs:
        size, ours = (low, at_low)
    return _proposal(setting, overrides(size), ours, theirs)
