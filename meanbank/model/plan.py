"""The layer plan: which memory, which value source and which positions each layer has, as data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meanbank.core.config import build, choose, to_plain
from meanbank.core.conventions import Conventions, QKNorm, TokenShift
from meanbank.memory import KVM, MemoryConfig
from meanbank.values import Projected, ValueSourceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressPlan:
    """How queries and keys are made and carry positions.

    What is left out follows the backbone and the memory: half the channels of gptalpha2 are
    rotated and all of nanochat, but half under KVM and none under OVQ, for example.

    rotary_fraction: share of a head's channels that is rotated; rope_theta: base of the
    frequencies, default the model's; qk_norm: whether heads are normalised; token_shift: whether
    queries and keys are moved towards the previous token's.
    """

    rotary_fraction: float | None = None
    rope_theta: float | None = None
    qk_norm: QKNorm | None = None
    token_shift: TokenShift | None = None

    def __post_init__(self) -> None:
        if self.rotary_fraction is not None and not 0 <= self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be between 0 and 1, got {self.rotary_fraction}")
        if self.rope_theta is not None and self.rope_theta <= 0:
            raise ValueError(f"rope_theta must be positive, got {self.rope_theta}")

    def resolved(self, conventions: Conventions) -> "AddressPlan":
        """The same with everything filled in that was left open, but for the model's rope_theta."""
        names = ("rotary_fraction", "qk_norm", "token_shift")
        filled = {n: getattr(conventions, n) for n in names if getattr(self, n) is None}
        return dataclasses.replace(self, **filled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer: its memory, where its values come from, and its address."""

    memory: MemoryConfig = KVM()
    values: ValueSourceConfig = Projected()
    address: AddressPlan = AddressPlan()

    def resolved(self, backbone: Conventions, first_layer: int = 0) -> "LayerPlan":
        """The same with everything filled in that was left open.

        first_layer: the first layer with the same type of memory.
        """
        conventions = self.memory.conventions(backbone)
        return dataclasses.replace(
            self,
            values=self.values.resolved(conventions, first_layer),
            address=self.address.resolved(conventions),
        )

    def with_theta(self, rope_theta: float) -> "LayerPlan":
        """The same with the model's base of rotary frequencies, unless it has its own."""
        if self.address.rope_theta is not None:
            return self
        return dataclasses.replace(
            self, address=dataclasses.replace(self.address, rope_theta=rope_theta)
        )


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


def first_layers(memories: Sequence[MemoryConfig]) -> list[int]:
    """For each layer, the first one with the same type of memory."""
    tags = [memory.tag for memory in memories]
    return [tags.index(tag) for tag in tags]


def expand_plan(rules: list[Mapping[str, Any]], num_layers: int) -> list[dict[str, Any]]:
    """Turn rules into one plain entry a layer, as `MeanbankConfig.layers` holds them.

    A rule is a mapping with any of `memory`, `values` and `address`, and `where` (default "all",
    see `layers_at`); a later rule replaces what it names. A rule for a named place passes over a
    layer that would read its own values (the source `first_layer` in that very layer).

    >>> expand_plan([{"memory": {"type": "full"}},
    ...              {"where": "last_third", "values": {"type": "bank"}}], num_layers=6)
    """
    if not isinstance(rules, list):
        raise ValueError(f"plan must be a list of rules, got {rules!r}")
    plans = [LayerPlan() for _ in range(num_layers)]
    targets = []
    for number, rule in enumerate(rules):
        if not isinstance(rule, Mapping):
            raise ValueError(f"plan.{number}: expected a mapping of settings, got {rule!r}")
        given = {name: part for name, part in rule.items() if name != "where"}
        parts = build(LayerPlan, given, f"plan.{number}")  # names the rule that is wrong
        targets.append((parts, given, rule.get("where", "all")))
    for parts, given, where in targets:
        changes = {name: getattr(parts, name) for name in given if name != "values"}
        for layer in layers_at(where, num_layers):
            plans[layer] = dataclasses.replace(plans[layer], **changes)
    first = first_layers([plan.memory for plan in plans])
    for parts, given, where in targets:
        for layer in layers_at(where, num_layers) if "values" in given else []:
            if isinstance(where, str) and parts.values.takes_over(first[layer]) == layer:
                continue
            plans[layer] = dataclasses.replace(plans[layer], values=parts.values)
    return [to_plain(plan) for plan in plans]
