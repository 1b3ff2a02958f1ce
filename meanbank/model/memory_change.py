"""A trained model with other memories: its own weights, which then remember otherwise."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meanbank.core.config import to_plain
from meanbank.core.table import StoredTable
from meanbank.memory import MemoryConfig
from meanbank.model.accounting import empty_model
from meanbank.model.config import MeanbankConfig
from meanbank.model.modeling import MeanbankForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """A model with other memories, in evaluation mode, and what that took.

    layers: those that have another memory. new: names of the parameters that the trained model
    lacks, at their start values; dropped: of those that it has for nothing now.
    """

    model: MeanbankForCausalLM
    layers: tuple[int, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


def with_memories(model: MeanbankForCausalLM, memories: Mapping[int, MemoryConfig]) -> MemoryChange:
    """The model with these memories by layer; it shares the weights of `model`, which stays as is.

    Layers keep their address and values as they were trained. Vectors of a memory that the model
    lacks (LN_s, temperatures) get their start values. Raises ValueError for a layer that is no
    softmax attention, for a memory that does not fit one or whose start values are random, and
    where layers would then take up the values of others than in training.
    """
    config = _changed_config(model.config, memories)
    changed = empty_model(config)
    for name, module in model.named_modules():
        if isinstance(module, StoredTable):
            delattr(*_place(changed, name))  # a parameter's name takes no module
            setattr(*_place(changed, name), module)
    backbone: Any = model.base_model
    changed.model.stored_tables = backbone.stored_tables
    ours = dict(model.named_parameters())
    wanted = dict(changed.named_parameters())
    start = _start_values(
        model, config, memories, {n: p for n, p in wanted.items() if n not in ours}
    )
    for name in wanted:
        setattr(*_place(changed, name), ours[name] if name in ours else start[name])
    changed.generation_config = model.generation_config
    return MemoryChange(
        model=changed.eval(),
        layers=tuple(sorted(memories)),
        new=tuple(start),
        dropped=tuple(name for name in ours if name not in wanted),
    )


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter or a module, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _changed_config(config: MeanbankConfig, memories: Mapping[int, MemoryConfig]) -> MeanbankConfig:
    """The configuration with these memories, all else as it is; ValueError where that cannot be."""
    plans = config.plans()
    for layer, memory in memories.items():
        plan = plans[layer]
        if not (plan.memory.has_address and memory.has_address):
            raise ValueError(
                f"layer {layer} cannot become {memory.tag}: a layer with {plan.memory.tag} has "
                "other weights"
            )
        try:
            memory.check(config.geometry(plan))
        except ValueError as error:
            fraction = plan.address.rotary_fraction
            raise ValueError(
                f"layer {layer} keeps the rotary_fraction {fraction:g} that it was trained with: "
                f"{error}"
            ) from None
    settings = config.to_dict()
    settings["layers"] = [
        {**entry, "memory": to_plain(memories[layer])} if layer in memories else entry
        for layer, entry in enumerate(settings["layers"])
    ]
    changed = MeanbankConfig.from_dict(settings)
    for layer, (plan, before, after) in enumerate(
        zip(plans, config.places(), changed.places(), strict=True)
    ):
        was, now = plan.values.refers_to(before), plan.values.refers_to(after)
        if was != now:
            raise ValueError(
                f"with these memories layer {layer} would take up the values of layer {min(now)}, "
                f"not of {min(was)} as in training (of the first layer with its type of memory): "
                "change the memories of all these layers alike"
            )
    return changed


def _start_values(
    model: MeanbankForCausalLM,
    config: MeanbankConfig,
    memories: Mapping[int, MemoryConfig],
    lacking: Mapping[str, Tensor],
) -> dict[str, nn.Parameter]:
    """Of the parameters that the model lacks, all of them vectors of these memories."""
    plans, found = config.plans(), {}
    for layer, memory in memories.items():
        prefix = f"model.layers.{layer}.attention.memory."
        names = [name for name in lacking if name.startswith(prefix)]
        for name in names:
            if lacking[name].ndim > 1:
                raise ValueError(
                    f"{name} would start with random numbers, for the model was trained without: "
                    "choose a memory without it, such as a kvm with merge_gate: none"
                )
        if names:
            with torch.random.fork_rng(devices=[]):
                built = memory.build(config.geometry(plans[layer]))
                built.initialize()
            like = next(model.model.layers[layer].parameters())
            for name in names:
                value = built.get_parameter(name.removeprefix(prefix)).detach()
                found[name] = nn.Parameter(value.to(device=like.device, dtype=like.dtype))
    others = [name for name in lacking if name not in found]
    if others:
        raise ValueError(f"the trained model has no {others[0]}, which these memories need")
    return found
