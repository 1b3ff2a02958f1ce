"""The layer plan: which memory, which value source and which positions each layer has, as data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meanbank.core.config import build, choose, to_plain
from meanbank.memory import KVM, MemoryConfig
from meanbank.values import Projected, ValueSourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressPlan:
    """How queries and keys carry positions: the fraction of channels that is rotated."""

    rotary_fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be between 0 and 1, got {self.rotary_fraction}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer: its memory, where its values come from, and its address."""

    memory: MemoryConfig = KVM()
    values: ValueSourceConfig = Projected()
    address: AddressPlan = AddressPlan()


PLACES = {
    "all": lambda layer, layers: True,
    "last_third": lambda layer, layers: layer >= 2 * layers // 3,
    "last_two_thirds": lambda layer, layers: layer >= layers // 3,
    "second_half": lambda layer, layers: layer >= layers // 2,
    "every_other": lambda layer, layers: layer % 2 == (layers - 1) % 2,
    "even": lambda layer, layers: layer % 2 == 0,
    "odd": lambda layer, layers: layer % 2 == 1,
}


def layers_at(where: str | Sequence[int], num_layers: int) -> list[int]:
    """Layer indices of a named place ("all", "last_third", "every_other", ...) or a list of them.

    "every_other" has the parity of the last layer; "last_third" starts at `2 * layers // 3`.
    """
    if isinstance(where, str):
        chosen = PLACES[choose("place", where, PLACES)]
        return [layer for layer in range(num_layers) if chosen(layer, num_layers)]
    if not isinstance(where, (list, tuple)):
        raise ValueError(f"where must be the name of a place or a list of layers, got {where!r}")
    layers = list(where)
    for layer in layers:
        if (
            isinstance(layer, bool)
            or not isinstance(layer, int)
            or not -num_layers <= layer < num_layers
        ):
            raise ValueError(f"there is no layer {layer!r} among {num_layers} layers")
    return [layer % num_layers for layer in layers]


def expand_plan(rules: list[Mapping[str, Any]], num_layers: int) -> list[dict[str, Any]]:
    """Turn rules into one plain entry a layer, as `MeanbankConfig.layers` holds them.

    A rule is a mapping with any of `memory`, `values` and `address`, and `where` (default "all",
    see `layers_at`); a later rule replaces what it names.

    >>> expand_plan([{"memory": {"type": "full"}},
    ...              {"where": "last_third", "values": {"type": "bank"}}], num_layers=6)
    """
    if not isinstance(rules, list):
        raise ValueError(f"plan must be a list of rules, got {rules!r}")
    entries: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for number, rule in enumerate(rules):
        if not isinstance(rule, Mapping):
            raise ValueError(f"plan.{number}: expected a mapping of settings, got {rule!r}")
        parts = {name: part for name, part in rule.items() if name != "where"}
        build(LayerPlan, parts, f"plan.{number}")  # names the rule that is wrong
        for layer in layers_at(rule.get("where", "all"), num_layers):
            entries[layer].update(parts)
    return [to_plain(build(LayerPlan, entry)) for entry in entries]
