"""What makes one run comparable with another: equal parameters, tokens or FLOPs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

from meanbank.core.config import choose
from meanbank.training.config import RunConfig, load_config
from meanbank.training.planning import (
    Convention,
    batch_shape,
    flops_per_token,
    model_of,
    nearest_steps,
)

By = Literal["params", "tokens", "flops"]
Load = Callable[[Sequence[str]], RunConfig]
LARGEST = 1 << 20  # of a hidden_size or a depth that is tried
DEEPEST = 1024  # layers: nobody wants a proposal beyond, and building them takes minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings that bring a run near another one.

    setting: what is changed; overrides: the arguments of `--set`; ours, theirs: parameters, tokens
    or training FLOPs of both, once they are set; difference_percent: by how much ours exceed.
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
    """Changes of configuration `name` (with overrides) that make it comparable with `other`.

    by "params": the hidden_size (same depth) and the depth (same hidden_size) whose number of
    parameters comes nearest, where the plan allows others (one that lists layers by number keeps
    its lists); "tokens" and "flops": the steps. Raises ValueError where nothing can be changed.
    """

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(name, [*overrides, *more])

    config, reference = load(()), load_config(other)
    if choose("by", by, ("params", "tokens", "flops")) != "params":
        return [_steps(load, config, reference, by, convention)]
    theirs = num_parameters(reference)
    found = [_width(load, config, theirs), _depth(load, config, theirs)]
    proposals = [proposal for proposal in found if proposal is not None]
    if not proposals:
        raise ValueError(f"neither hidden_size nor num_hidden_layers of {name} can be changed")
    return proposals


def num_parameters(config: RunConfig) -> int:
    """Parameters of a run's model."""
    return sum(parameter.numel() for parameter in model_of(config).parameters())


def _steps(
    load: Load, config: RunConfig, reference: RunConfig, by: By, convention: Convention
) -> Proposal:
    def cost(of: RunConfig) -> float:
        """Of a step."""
        length, tokens = batch_shape(of)
        if by == "tokens":
            return tokens
        parts = flops_per_token(model_of(of), length, convention)
        return tokens * sum(part.total for part in parts.values())

    theirs = cost(reference) * reference.training.steps
    steps = nearest_steps(theirs, cost(config))
    overrides = (f"training.steps={steps}",)
    load(overrides)  # raises where another setting forbids it
    return _proposal("steps", overrides, cost(config) * steps, theirs)


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
    theirs: int,
    largest: int = LARGEST,
) -> Proposal | None:
    """The size, counted from 1, whose parameters come nearest; None where it cannot be set."""

    @functools.cache
    def parameters(size: int) -> int | None:
        try:
            return num_parameters(load(overrides(size)))
        except ValueError:  # a plan may name layers that a model of fewer does not have
            return None

    low, high = 0, max(1, start)
    while (count := parameters(high)) is not None and count < theirs:
        low, high = high, 2 * high
        if high > largest:
            return None
    while high - low > 1:  # parameters grow with the size; what cannot be set is too small
        middle = (low + high) // 2
        count = parameters(middle)
        low, high = (middle, high) if count is None or count < theirs else (low, middle)
    at_low, at_high = (parameters(size) if size else 0 for size in (low, high))
    if at_low is None or at_high is None:  # what would be nearest may be what cannot be set
        return None
    size, ours = (high, at_high)
    if low and theirs - at_low <= at_high - theirs:
        size, ours = (low, at_low)
    return _proposal(setting, overrides(size), ours, theirs)
