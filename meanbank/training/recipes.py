"""Training recipes: optimizer, parameter groups and schedule, by name."""

import abc
import dataclasses
from typing import Any

import torch
from torch import nn

from meanbank.core.config import Tagged
from meanbank.model import MeanbankForCausalLM
from meanbank.values.bank import BankValues
from meanbank.values.projected import low_rank

BANK_GROUPS = ("bank tables", "bank scales")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Tagged, kind="recipe"):
    """An optimizer and its schedule.

    clip: largest gradient norm over all parameters; null does not clip.
    table_learning_rate, scale_learning_rate: of bank tables and their scales, which are a group
    of their own whatever the recipe (AdamW, betas .8/.995 with decay .01, and .96/.95 without).
    """

    clip: float | None = None
    table_learning_rate: float = 0.15
    scale_learning_rate: float = 0.1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{field.name} must not be negative, got {value}")

    @abc.abstractmethod
    def groups(self, model: MeanbankForCausalLM, steps: int) -> list[dict[str, Any]]:
        """Groups of everything but banks: `params`, `lr`, `weight_decay`, `betas`, `eps`, `name`.

        lr and weight_decay are their peaks.
        """

    def decay_factor(self, factor: float) -> float:
        """Factor of the decay coefficient (of all but banks) where the rate's is `factor`."""
        return 1.0

    def optimizer(self, model: MeanbankForCausalLM, steps: int) -> torch.optim.Optimizer:
        """AdamW over all trainable parameters; `set_progress` then drives it."""
        groups = self.groups(model, steps) + self._bank_groups(model)
        for group in groups:
            group["peak_lr"], group["peak_weight_decay"] = group["lr"], group["weight_decay"]
        return torch.optim.AdamW([group for group in groups if group["params"]])

    def set_progress(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Set every group's rates for a step at which the schedule stands at `factor`."""
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
            if group["name"] not in BANK_GROUPS:
                group["weight_decay"] = group["peak_weight_decay"] * self.decay_factor(factor)

    def _bank_groups(self, model: MeanbankForCausalLM) -> list[dict[str, Any]]:
        banks = [module for module in model.modules() if isinstance(module, BankValues)]
        tables = [bank.table for bank in banks]
        scales = [bank.scale for bank in banks if isinstance(bank.scale, nn.Parameter)]
        table = {"lr": self.table_learning_rate, "weight_decay": 0.01, "betas": (0.8, 0.995)}
        scale = {"lr": self.scale_learning_rate, "weight_decay": 0.0, "betas": (0.96, 0.95)}
        tables_name, scales_name = BANK_GROUPS
        return [
            {"name": tables_name, "params": tables, "eps": 1e-10, **table},
            {"name": scales_name, "params": scales, "eps": 1e-10, **scale},
        ]


def schedule(step: int, steps: int, warmup_steps: int) -> float:
    """Share of the peak learning rate at step 0, 1, ..., steps - 1: up linearly, then down to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (steps - step) / max(1, steps - warmup_steps)


def own_parameters(model: MeanbankForCausalLM) -> list[tuple[str, nn.Parameter]]:
    """All trainable parameters but those of banks."""
    banks = {
        parameter
        for module in model.modules()
        if isinstance(module, BankValues)
        for parameter in module.parameters()
    }
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and p not in banks]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVMRecipe(Recipe, tag="kvm"):
    """The KVM paper's: AdamW with decay that follows the learning rate, scaled by width and length.

    With r = hidden_size / 768: matrices and the head use learning_rate / r and weight_decay * r
    (low-rank second factors use their rank's ratio), the embedding uses them unscaled, vectors and
    scalars are not decayed. Runs longer than reference_steps scale both by
    sqrt(reference_steps / steps). No clipping.
    """

    learning_rate: float = 2e-3
    weight_decay: float = 0.2
    reference_width: int = 768
    reference_steps: int = 6000

    def decay_factor(self, factor: float) -> float:
        return factor  # AdamC: decay ~ lr^2 / peak, since AdamW multiplies by lr once more

    def groups(self, model: MeanbankForCausalLM, steps: int) -> list[dict[str, Any]]:
        width = model.config.hidden_size / self.reference_width
        rank = low_rank(model.config.hidden_size) / low_rank(self.reference_width)
        longer = min(1.0, (self.reference_steps / steps) ** 0.5)
        members: dict[str, list[nn.Parameter]] = {
            "embedding": [],
            "vectors": [],
            "matrices": [],
            "low-rank factors": [],
            "head": [],
        }
        for name, parameter in own_parameters(model):
            members[_kind(name, parameter)].append(parameter)
        ratios = {"matrices": width, "head": width, "low-rank factors": rank}
        return [
            {
                "name": kind,
                "params": parameters,
                "lr": self.learning_rate * longer / ratios.get(kind, 1.0),
                "weight_decay": 0.0
                if kind == "vectors"
                else self.weight_decay * longer * ratios.get(kind, 1.0),
                "betas": (0.9, 0.95),
                "eps": 1e-8,
            }
            for kind, parameters in members.items()
        ]


def _kind(name: str, parameter: nn.Parameter) -> str:
    if name == "model.embedding.weight":
        return "embedding"
    if name == "lm_head.weight":
        return "head"
    if parameter.ndim < 2:
        return "vectors"
    return "low-rank factors" if name.endswith("residual.up.weight") else "matrices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainRecipe(Recipe, tag="plain"):
    """AdamW with one learning rate, decay on everything but vectors and scalars, and clipping."""

    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def groups(self, model: MeanbankForCausalLM, steps: int) -> list[dict[str, Any]]:
        parameters = [parameter for _, parameter in own_parameters(model)]
        shared = {"lr": self.learning_rate, "betas": (0.9, 0.95), "eps": 1e-8}
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        return [
            {"name": "matrices", "params": matrices, "weight_decay": self.weight_decay, **shared},
            {"name": "vectors", "params": vectors, "weight_decay": 0.0, **shared},
        ]
