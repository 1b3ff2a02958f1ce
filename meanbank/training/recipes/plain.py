"""AdamW as it is commonly used."""

import dataclasses
from collections.abc import Sequence

from meanbank.model.roles import Member, Role, pick
from meanbank.training.recipes.base import Group, Recipe, adamw_group

MATRICES = (Role.EMBEDDING, Role.HEAD, Role.MATRIX, Role.LOW_RANK, Role.VALUE_GATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainRecipe(Recipe, tag="plain"):
    """AdamW with one learning rate, decay on everything but vectors and scalars, and clipping."""

    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def groups(self, members: Sequence[Member], width: int, steps: int) -> list[Group]:
        matrices = pick(members, *MATRICES)
        vectors = pick(members, Role.VECTOR, Role.SMEAR)
        return [
            adamw_group("matrices", matrices, self.learning_rate, self.weight_decay),
            adamw_group("vectors", vectors, self.learning_rate, 0.0),
        ]
