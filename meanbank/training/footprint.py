"""The memory that a run's model needs to serve contexts and to be trained, against full attention.

From the configuration alone, as `planning`.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from meanbank.core.config import choose
from meanbank.model.accounting import empty_model
from meanbank.model.bank_plan import BankBreakEven, break_even
from meanbank.model.memory_plan import (
    ServingBytes,
    TrainingBytes,
    largest_context,
    optimizer_nbytes,
    serving_bytes,
    training_bytes,
)
from meanbank.training.config import RunConfig
from meanbank.training.planning import batch_shape, vocabulary

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
FULL = [{"memory": "full", "values": "projection"}]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """One model: what serving and, where it was asked for, a training step need, in bytes.

    largest_context: tokens of each sequence that a budget allows; None where there is no budget,
    or where any length does (`any_context`).
    """

    serving: ServingBytes
    training: TrainingBytes | None = None
    largest_context: int | None = None
    any_context: bool = False

    def plain(self) -> dict[str, Any]:
        """All figures, totals included."""
        found = dataclasses.asdict(self)
        found["serving"]["total"] = self.serving.total
        if self.training is not None:
            found["training"]["total"] = self.training.total
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class FootprintPlan:
    """A run's model, and the same with full attention and projected values in every layer.

    budget: bytes that serving may take, if any; break_even: where each bank layer pays off.
    """

    budget: int | None
    plan: Footprint
    full_attention: Footprint
    break_even: tuple[BankBreakEven, ...]

    def plain(self) -> dict[str, Any]:
        """All figures, totals included."""
        return {
            **dataclasses.asdict(self),
            "plan": self.plan.plain(),
            "full_attention": self.full_attention.plain(),
        }


def plan_footprint(
    config: RunConfig,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "float32",
    budget: int | None = None,
    train_length: int | None = None,
) -> FootprintPlan:
    """Bytes of serving `batch` sequences of `context` tokens (default: the run's) in `dtype`.

    train_length: also those of a training step of the run, in fp32 and with its batch, at so many
    tokens a sequence. Raises ValueError for an unknown dtype, and where
    the configuration does not tell the vocabulary.
    """
    served = DTYPES[choose("dtype", dtype, DTYPES)]
    context = batch_shape(config)[0] if context is None else context
    full = dataclasses.replace(config, model={**_open(config.model), "plan": FULL})
    footprints, points = [], ()
    for run in (config, full):
        model = empty_model(run.model_config(vocabulary(run)))
        training = None
        if train_length is not None:
            settings = run.training
            groups = settings.recipe.optimizer(model, settings.steps).param_groups
            training = training_bytes(
                model,
                train_length,
                -(-run.data.batch_size // settings.accumulation),
                optimizer_nbytes(groups),
                checkpointing=settings.checkpointing == "blocks",
            )
        nn.Module.to(model, served)
        largest = None if budget is None else largest_context(model, budget, batch)
        footprints.append(
            Footprint(
                serving=serving_bytes(model, context, batch),
                training=training,
                largest_context=largest,
                any_context=budget is not None and largest is None,
            )
        )
        points = points or break_even(model, batch)
    return FootprintPlan(
        budget=budget, plan=footprints[0], full_attention=footprints[1], break_even=points
    )


def _open(settings: dict[str, Any]) -> dict[str, Any]:
    """A model's settings without its layers."""
    return {name: value for name, value in settings.items() if name not in ("plan", "layers")}
