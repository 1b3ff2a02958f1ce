"""What a recipe is: optimizers, parameter groups and their schedules."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from meanbank.core.config import Tagged
from meanbank.model import MeanbankForCausalLM
from meanbank.model.roles import Member, Role, members_of, pick
from meanbank.model.table_gradients import TableGradients, set_table_gradients
from meanbank.training.recipes.lazy_adamw import LazyAdamW
from meanbank.training.recipes.muon import Muon
from meanbank.training.recipes.optimizers import Optimizers

Group = dict[str, Any]  # of an optimizer, with its name
TABLES = "tables"  # name of the group of tables over token ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Tagged, kind="recipe"):
    """Optimizers and their schedules. Learning rates and decays of a recipe are peak values.

    clip: largest gradient norm over all parameters; null does not clip.
    table_learning_rate, scale_learning_rate, head_scale_learning_rate, mixture_learning_rate: of
    tables over token ids, of factors of values (gamma, and b of a mixture), of factors a head, and
    of a of a mixture. These are the BoV paper's groups (its section 4 and its authors' code),
    whatever the recipe: AdamW with eps 1e-10 and decays that stay.
    table_gradients: "dense" is the papers'. With "sparse", gradients of tables have a row for each
    token that a step looks up and no others, and `LazyAdamW` updates and decays these rows, and
    their moments, alone; rows that come rarely learn less, as it tells. For vocabularies with more
    ids than a step has tokens: the gradient grows with these, and not with the vocabulary.
    """

    clip: float | None = None
    table_learning_rate: float = 0.15
    scale_learning_rate: float = 0.1
    head_scale_learning_rate: float = 0.005
    mixture_learning_rate: float = 0.005
    table_gradients: TableGradients = "dense"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{field.name} must not be negative, got {value}")
        if self.clip == 0:
            raise ValueError("clip must be positive, or null to clip nothing: 0 leaves no gradient")

    @abc.abstractmethod
    def groups(self, members: Sequence[Member], width: int, steps: int) -> list[Group]:
        """Groups for AdamW of everything but `value_groups` and `muon_groups`, see `adamw_group`.

        members: the parameters; width: the model's hidden_size; steps: of the whole run.
        """

    def muon_groups(self, members: Sequence[Member]) -> list[Group]:
        """Groups for `torch.optim.Muon`; none by default."""
        return []

    def value_groups(self, members: Sequence[Member]) -> list[Group]:
        """Groups of what value sources add to a model: tables, factors and mixtures."""
        tables = pick(members, Role.TABLE)
        scales = pick(members, Role.SCALE, Role.OTHER_WEIGHT)
        head_scales = pick(members, Role.HEAD_SCALE)
        weights = pick(members, Role.CONTEXTUAL_WEIGHT)
        values = [
            (TABLES, tables, self.table_learning_rate, 0.01, (0.8, 0.995)),
            ("scales", scales, self.scale_learning_rate, 0.0, (0.96, 0.95)),
            ("head scales", head_scales, self.head_scale_learning_rate, 0.0, (0.8, 0.95)),
            ("contextual weights", weights, self.mixture_learning_rate, 0.05, (0.8, 0.95)),
        ]
        return [
            {"decay_stays": True, **adamw_group(name, found, rate, decay, betas=betas, eps=1e-10)}
            for name, found, rate, decay, betas in values
        ]

    def optimizer(self, model: MeanbankForCausalLM, steps: int) -> Optimizers:
        """Optimizers over all trainable parameters, each in one group; `set_step` drives them.

        From now on the model's tables have the gradients that these take, see `table_gradients`.
        """
        members = members_of(model)
        muon = [group for group in self.muon_groups(members) if group["params"]]
        adamw = [
            *self.groups(members, model.config.hidden_size, steps),
            *self.value_groups(members),
        ]
        adamw = [group for group in adamw if group["params"]]
        for group in muon + adamw:
            group["peak_lr"], group["peak_weight_decay"] = group["lr"], group["weight_decay"]
        set_table_gradients(model, self.table_gradients)
        lazy = {TABLES} if self.table_gradients == "sparse" else set()
        parts = {
            Muon: muon,
            torch.optim.AdamW: [group for group in adamw if group["name"] not in lazy],
            LazyAdamW: [group for group in adamw if group["name"] in lazy],
        }
        return Optimizers([kind(groups) for kind, groups in parts.items() if groups])

    def default_warmup_steps(self, steps: int) -> int:
        """Steps over which the learning rate rises where nothing else is asked for."""
        return min(200, steps // 10)

    def factor(self, step: int, steps: int, warmup_steps: int) -> float:
        """Share of the peak learning rate at step 0, 1, ..., steps - 1."""
        return linear(step, steps, warmup_steps)

    def set_step(
        self, optimizer: Optimizers, step: int, steps: int, warmup_steps: int | None = None
    ) -> None:
        """Set what follows a schedule, in every group, for step 0, 1, ..., steps - 1.

        warmup_steps: None takes the recipe's own.
        """
        if warmup_steps is None:
            warmup_steps = self.default_warmup_steps(steps)
        factor = self.factor(step, steps, warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
            self.set_group(group, factor, step, steps)

    def set_group(self, group: Group, factor: float, step: int, steps: int) -> None:
        """Set what else follows a schedule where the learning rate stands at `factor`."""


def adamw_group(
    name: str,
    members: Iterable[Member],
    learning_rate: float,
    weight_decay: float,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> Group:
    """A group for AdamW, at its peak values."""
    return {
        "name": name,
        "params": [member.parameter for member in members],
        "lr": learning_rate,
        "weight_decay": weight_decay,
        "betas": betas,
        "eps": eps,
    }


def linear(step: int, steps: int, warmup_steps: int) -> float:
    """Up linearly over the first warmup_steps, then down to 0 at the end."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (steps - step) / max(1, steps - warmup_steps)
