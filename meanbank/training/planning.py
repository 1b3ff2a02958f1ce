"""What a run will cost, from its configuration alone: no data, no weights."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

from meanbank.core.flops import Flops
from meanbank.data.stages import BatchStage
from meanbank.data.tokenizer import load_tokenizer, token_bytes
from meanbank.model import MeanbankForCausalLM
from meanbank.model.accounting import (
    empty_model,
    flops_by_part,
    papers_flops_by_part,
    parameters_by_part,
)
from meanbank.model.attention import SoftmaxAttention
from meanbank.model.block import Block
from meanbank.training.config import RunConfig

Convention = Literal["exact", "papers"]
CONVENTIONS: dict[Convention, Callable[[MeanbankForCausalLM, int], dict[str, Flops]]] = {
    "exact": flops_by_part,
    "papers": papers_flops_by_part,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """FLOPs a token, on average over a training sequence."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """A group of an optimizer: its parameters and its peak rates.

    betas: of AdamW; None for Muon, which has a momentum.
    """

    name: str
    tensors: int
    elements: int
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes after the first `tokens` tokens of one sequence, without activations.

    state: a bound on what the layers remember; saved_by_banks: how many more those would be if bank
    layers kept values in place of token ids; tables: those of tables over token ids, which are
    parameters, whatever the number of sequences.
    """

    dtype: str
    tokens: int
    state: int
    saved_by_banks: int
    tables: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run costs.

    num_parameters, parameters: their number, and that by part. flops, flops_per_token: FLOPs a
    token at `sequence_length` tokens, by part and in all, as `convention` counts. stages: the parts
    of the run by the shape of their batches. tokens, training_flops: of the whole run, each stage
    at its own length. groups: learning rates and decays at their peaks, in a run of that many
    steps.
    """

    description: str
    vocab_size: int
    sequence_length: int
    convention: Convention
    num_parameters: int
    parameters: dict[str, int]
    flops: dict[str, FlopsPerToken]
    flops_per_token: float
    tokens_per_step: int
    steps: int
    stages: tuple[BatchStage, ...]
    tokens: int
    training_flops: float
    groups: tuple[GroupPlan, ...]
    memory: MemoryPlan


def plan_run(
    config: RunConfig,
    *,
    flops: float | None = None,
    tokens: float | None = None,
    convention: Convention = "exact",
) -> Plan:
    """The plan of a run.

    flops, tokens: the run is to spend that many FLOPs, or tokens, whatever steps it says; the
    nearest number of steps is taken, at least one (as the BoV authors do). At most one of them.
    Raises ValueError for a wrong budget, or when the configuration does not tell the vocabulary.
    """
    check_budget(flops, tokens)
    model = model_of(config)
    length, tokens_per_step = batch_shape(config)
    parts = flops_per_token(model, length, convention)
    steps = config.training.steps
    if flops is not None:
        steps = nearest_steps(flops, training_flops(model, config, convention) / steps)
    elif tokens is not None:
        steps = nearest_steps(tokens, training_tokens(config) / steps)
    training = dataclasses.replace(config.training, steps=steps, warmup_steps=None)
    planned = dataclasses.replace(config, training=training)
    parameters = parameters_by_part(model)
    return Plan(
        description=config.description,
        vocab_size=model.config.vocab_size,
        sequence_length=length,
        convention=convention,
        num_parameters=sum(parameters.values()),
        parameters=parameters,
        flops=parts,
        flops_per_token=sum(part.total for part in parts.values()),
        tokens_per_step=tokens_per_step,
        steps=steps,
        stages=stages(planned),
        tokens=training_tokens(planned),
        training_flops=training_flops(model, planned, convention),
        groups=groups_of(config, model, steps),
        memory=memory_of(model, length),
    )


def check_budget(flops: float | None, tokens: float | None) -> None:
    """Raises ValueError unless at most one is given, and that is positive."""
    if flops is not None and tokens is not None:
        raise ValueError("give a budget of FLOPs or of tokens, not both")
    for name, value in (("flops", flops), ("tokens", tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {value}")


def nearest_steps(budget: float, cost: float) -> int:
    """Steps of that cost that come nearest to a budget, at least one."""
    return max(1, round(budget / cost))


def vocabulary(config: RunConfig) -> int:
    """Size of the model's vocabulary: what the data says, or the tokenizer that it names."""
    data = config.data
    size = data.model_vocab_size()
    if size is not None:
        return size
    assert data.tokenizer is not None  # or the data would have said
    return data.padded(len(token_bytes(load_tokenizer(data.tokenizer))))


def model_of(config: RunConfig) -> MeanbankForCausalLM:
    """The run's model without weights."""
    return empty_model(config.model_config(vocabulary(config)))


def batch_shape(config: RunConfig) -> tuple[int, int]:
    """Tokens of the longest training sequence, and tokens a step (on average, for recall)."""
    data = config.data
    if data.recall is None:
        return data.sequence_length, data.sequence_length * data.batch_size
    stages = data.recall.curriculum
    average = sum(stage.fraction * stage.length for stage in stages)
    return max(stage.length for stage in stages), round(average * data.batch_size)


def stages(config: RunConfig) -> tuple[BatchStage, ...]:
    """The parts of a run in order: those of its sequence lengths or of recall, else one."""
    return config.data.stages(config.training.steps)


def training_tokens(config: RunConfig) -> int:
    """Tokens that a run trains on."""
    return sum(stage.tokens for stage in stages(config))


def training_flops(
    model: MeanbankForCausalLM, config: RunConfig, convention: Convention = "exact"
) -> float:
    """FLOPs of a run of that model."""
    total = 0.0
    for stage in stages(config):
        parts = flops_per_token(model, stage.length, convention).values()
        total += stage.tokens * sum(part.total for part in parts)
    return total


def flops_per_token(
    model: MeanbankForCausalLM, length: int, convention: Convention
) -> dict[str, FlopsPerToken]:
    """FLOPs a token of sequences of `length` tokens, by part, where there are any."""
    return {
        part: FlopsPerToken(forward=flops.forward / length, backward=flops.backward / length)
        for part, flops in CONVENTIONS[convention](model, length).items()
        if flops.total
    }


def groups_of(config: RunConfig, model: MeanbankForCausalLM, steps: int) -> tuple[GroupPlan, ...]:
    """The groups that the run's recipe makes, for a run of `steps` steps."""
    optimizer = config.training.recipe.optimizer(model, steps)
    return tuple(_group(group) for group in optimizer.param_groups if group["params"])


def _group(group: dict[str, Any]) -> GroupPlan:
    return GroupPlan(
        name=group["name"],
        tensors=len(group["params"]),
        elements=sum(parameter.numel() for parameter in group["params"]),
        learning_rate=group["peak_lr"],
        weight_decay=group["peak_weight_decay"],
        betas=group.get("betas"),
    )


def memory_of(model: MeanbankForCausalLM, tokens: int) -> MemoryPlan:
    """Bytes after `tokens` tokens of one sequence, in the model's dtype."""
    backbone: Any = model.model
    dtype, saved = model.dtype, 0
    for block in cast(Iterable[Block], backbone.layers):
        mixer = block.attention
        if isinstance(mixer, SoftmaxAttention):
            stored = (
                mixer.geometry.value_width * dtype.itemsize,
                mixer.values.stored_nbytes(dtype),
            )
            dense, kept = (mixer.memory.nbytes_max(tokens, 1, dtype, size) for size in stored)
            saved += dense - kept
    return MemoryPlan(
        dtype=str(dtype).removeprefix("torch."),
        tokens=tokens,
        state=backbone.memory_nbytes_max(tokens),
        saved_by_banks=saved,
        tables=parameters_by_part(model).get("bank tables", 0) * dtype.itemsize,
    )
