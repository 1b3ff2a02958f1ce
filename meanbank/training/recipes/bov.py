"""The BoV paper's recipe."""

import dataclasses
import math
from collections.abc import Sequence

from meanbank.model.roles import Member, Role, pick
from meanbank.training.recipes.base import Group, Recipe, adamw_group

WARMDOWN = 0.65  # share of all steps
FINAL = 0.05  # share of the peak learning rate at the end
MOMENTUM_STEPS = 400
FIRST_MOMENTUM, FULL_MOMENTUM, FINAL_MOMENTUM = 0.85, 0.97, 0.90


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoVRecipe(Recipe, tag="bov"):
    """Muon on matrices, AdamW on the rest (BoV paper, section 5, and its authors' code).

    Defaults are those of the 12-layer model. The 24-layer one at 1,048,576 tokens a step has
    matrix_learning_rate .02828, matrix_weight_decay .05974 and scale_learning_rate .7071, and a of
    a mixture .00707. Learning rates rise over 40 steps, stay, and fall linearly over the last 65 %
    of the steps to 5 %; Muon's momentum rises from .85 to .97 over 400 steps and falls to .90 with
    the learning rate (the smaller of both holds, where a run is so short that they meet); the
    decay of matrices falls to 0 by a cosine, that of the rest stays. No clipping.

    `torch.optim.Muon` stands in for the authors' own Muon. Both have Nesterov momentum, 5
    Newton-Schulz steps and updates times sqrt(max(1, rows / columns)). It differs from theirs in
    this:

    - one quintic polynomial in all Newton-Schulz steps (3.4445, -4.775, 2.0315); theirs are the
      Polar Express coefficients, another polynomial each step, which come closer to orthogonal;
    - no second moments: they divide the orthogonalised update by a running root mean square a row
      or column (beta2 .9) and keep its norm;
    - decay everywhere; theirs decays an entry only where that agrees with the sign of its update;
    - decay times the learning rate alone; theirs times sqrt(max(1, rows / columns)) as well.

    matrix_learning_rate, matrix_weight_decay: of attention, MLP and value-gate matrices, and of
    every other matrix that the other backbone, a memory or RWKV-7 brings.
    embedding_learning_rate, head_learning_rate, smear_learning_rate: with decays .001, .01 and 0.
    vector_learning_rate: of norms, token shifts, temperatures and the like, which the paper's
    models lack; the KVM paper's rate and betas, without decay.
    """

    matrix_learning_rate: float = 0.02
    matrix_weight_decay: float = 0.28
    embedding_learning_rate: float = 0.3
    head_learning_rate: float = 0.008
    smear_learning_rate: float = 0.2
    scale_learning_rate: float = 0.5
    vector_learning_rate: float = 2e-3

    def muon_groups(self, members: Sequence[Member]) -> list[Group]:
        found = pick(members, Role.MATRIX, Role.LOW_RANK, Role.VALUE_GATE)
        matrices = {
            "name": "matrices",
            "params": [member.parameter for member in found],
            "lr": self.matrix_learning_rate,
            "weight_decay": self.matrix_weight_decay,
            "momentum": FIRST_MOMENTUM,
            "nesterov": True,
            "ns_steps": 5,
            "adjust_lr_fn": "original",
        }
        return [matrices]

    def groups(self, members: Sequence[Member], width: int, steps: int) -> list[Group]:
        rest = [
            ("head", Role.HEAD, self.head_learning_rate, 0.01, (0.8, 0.96)),
            ("embedding", Role.EMBEDDING, self.embedding_learning_rate, 0.001, (0.8, 0.995)),
            ("smear", Role.SMEAR, self.smear_learning_rate, 0.0, (0.8, 0.95)),
            ("vectors", Role.VECTOR, self.vector_learning_rate, 0.0, (0.9, 0.95)),
        ]
        return [
            adamw_group(name, pick(members, role), rate, decay, betas=betas, eps=1e-10)
            for name, role, rate, decay, betas in rest
        ]

    def default_warmup_steps(self, steps: int) -> int:
        return min(40, steps // 10)

    def factor(self, step: int, steps: int, warmup_steps: int) -> float:
        up = (step + 1) / warmup_steps if step < warmup_steps else 1.0
        left = warmdown_left(step, steps)
        return min(up, left + (1 - left) * FINAL)

    def set_group(self, group: Group, factor: float, step: int, steps: int) -> None:
        if "momentum" in group:  # Muon's
            group["momentum"] = momentum(step, steps)
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            group["weight_decay"] = group["peak_weight_decay"] * cosine


def warmdown_left(step: int, steps: int) -> float:
    """Share of the warm-down that is left: 1 before it starts."""
    return min(1.0, (steps - step) / round(WARMDOWN * steps))


def momentum(step: int, steps: int) -> float:
    """Momentum of Muon at step 0, 1, ..., steps - 1."""
    risen = min(1.0, step / MOMENTUM_STEPS)
    up = (1 - risen) * FIRST_MOMENTUM + risen * FULL_MOMENTUM
    left = warmdown_left(step, steps)
    return min(up, left * FULL_MOMENTUM + (1 - left) * FINAL_MOMENTUM)
