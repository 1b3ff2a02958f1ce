"""The KVM paper's recipe."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from meanbank.model.roles import Member, Role, pick
from meanbank.model.rwkv7 import decay_rank, gate_rank
from meanbank.training.recipes.base import Group, Recipe, adamw_group
from meanbank.values.projected import residual_rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVMRecipe(Recipe, tag="kvm"):
    """AdamW with decay that follows the learning rate, scaled by width and length.

    With r = hidden_size / reference_width: matrices and the head use learning_rate / r and
    weight_decay * r, second factors of low-rank maps the ratio of their own rank in place of r; the
    embedding uses both unscaled, vectors and scalars are not decayed. Runs longer than
    reference_steps scale both by sqrt(reference_steps / steps). Up linearly, then down to 0; no
    clipping. Gates that read a fixed number of channels, which the paper does not have, are
    matrices of ratio 1.
    """

    learning_rate: float = 2e-3
    weight_decay: float = 0.2
    reference_width: int = 768
    reference_steps: int = 6000

    def groups(self, members: Sequence[Member], width: int, steps: int) -> list[Group]:
        longer = min(1.0, (self.reference_steps / steps) ** 0.5)
        ratio = width / self.reference_width
        gates = pick(members, Role.SMEAR, Role.VALUE_GATE)
        vectors = pick(members, Role.VECTOR) + [each for each in gates if each.parameter.ndim < 2]
        gates = [each for each in gates if each.parameter.ndim == 2]
        factors = defaultdict(list)
        for each in pick(members, Role.LOW_RANK):
            reference = rank_at(each.name, self.reference_width)
            factors[rank_at(each.name, width) / reference].append(each)
        matrices = [
            ("matrices", pick(members, Role.MATRIX), ratio),
            *(("low-rank factors", found, ratio) for ratio, found in factors.items()),
            ("head", pick(members, Role.HEAD), ratio),
            ("narrow gates", gates, 1.0),
        ]
        rate, decay = self.learning_rate * longer, self.weight_decay * longer
        return [
            adamw_group("embedding", pick(members, Role.EMBEDDING), rate, decay),
            adamw_group("vectors", vectors, rate, 0.0),
            *(adamw_group(name, found, rate / r, decay * r) for name, found, r in matrices),
        ]

    def set_group(self, group: Group, factor: float, step: int, steps: int) -> None:
        if not group.get("decay_stays"):
            # AdamC: decay ~ lr^2 / peak, since AdamW multiplies by lr once more
            group["weight_decay"] = group["peak_weight_decay"] * factor


def rank_at(name: str, width: int) -> int:
    """Rank of the low-rank map with this second factor in a model of another width."""
    if ".values." in name:  # the gate of the value residual
        return residual_rank(width)
    if name.endswith("attention.gate.up.weight"):  # RWKV-7's three
        return gate_rank(width)
    return decay_rank(width)
