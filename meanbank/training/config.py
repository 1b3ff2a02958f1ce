"""A run as data: model, data and training settings, from a YAML file and overrides."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from meanbank.core.bundled import bundled, find_yaml, read_yaml
from meanbank.core.config import apply_override, build, check_least, choose, to_plain
from meanbank.core.errors import one_line
from meanbank.data import DataConfig
from meanbank.model import MeanbankConfig
from meanbank.training.recipes import KVMRecipe, Recipe

TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    steps: optimizer steps; seed: of start values and data order.
    recipe: optimizers, groups and schedules; "kvm", "bov" or "plain", or a mapping with settings.
    warmup_steps: the learning rate rises over these; default the recipe's, a tenth of the steps and
        at most 200 (bov: 40).
    evaluate_every: steps between held-out evaluations (0: never), on evaluation_tokens tokens.
    position_loss_every: steps between those whose own loss is written down by position, as
        `loss_at/4-7` in the metrics (0: never).
    memory_statistics_every: steps between looks at how memories are used, on one held-out document
        (recall: sequence), for `statistics.jsonl` (0: never).
    checkpoint_every: steps between checkpoints (0: at the end only); keep_last: how many stay;
        keep_every: at multiples of so many steps one is written that stays forever (0: none).
    write_behind: training goes on for so many steps while a checkpoint is written, then it waits.
        A kill loses at most checkpoint_every steps, and with more than 1 here as many more.
    accumulation: a batch goes through the model in so many parts, one after the other, which takes
        less memory; the gradient is that of the whole batch, but for rounding.
    trackers: who is told the metrics besides metrics.jsonl; each is an extra of its name. Nothing
        is sent anywhere unless the environment says so, see `meanbank.training.trackers`.
    utilization: measure what this machine can do, a second at the start, and log the share of it
        that each step uses.
    device: "auto" takes a GPU where there is one.
    parallel: what several ranks (of torchrun) share. "ddp": each has the whole model, and gradients
        are added up; "fsdp": each has a part of every weight, gradient and moment.
    tables: those over token ids, with either: "replicated", whole on each rank, or "sharded", rows
        divided over the ranks, which ask each other for those that a batch looks up.
    checkpointing: "blocks" keeps only what goes into a block and computes the rest again for the
        backward pass.
    precision: "bfloat16" has products of matrices and attention in it (`torch.autocast`); weights,
        gradients, moments and evaluations stay float32.
    compile: the blocks go through `torch.compile`.
    """

    steps: int = 1000
    seed: int = 0
    recipe: Recipe = KVMRecipe()
    warmup_steps: int | None = None
    evaluate_every: int = 0
    evaluation_tokens: int = 65536
    position_loss_every: int = 0
    memory_statistics_every: int = 0
    checkpoint_every: int = 0
    keep_last: int = 1
    keep_every: int = 0
    write_behind: int = 1
    accumulation: int = 1
    trackers: tuple[TrackerName, ...] = ()
    utilization: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    tables: Literal["replicated", "sharded"] = "replicated"
    checkpointing: Literal["none", "blocks"] = "none"
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        ones = ("steps", "keep_last", "write_behind", "evaluation_tokens", "accumulation")
        check_least(self, 1, *ones)
        every = ("evaluate_every", "checkpoint_every", "keep_every")
        every += ("position_loss_every", "memory_statistics_every")
        check_least(self, 0, "seed", *every)
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers must be named once, got {', '.join(self.trackers)}")
        if self.warmup_steps is None:
            warmup_steps = self.recipe.default_warmup_steps(self.steps)
            object.__setattr__(self, "warmup_steps", warmup_steps)
        elif not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be between 0 and steps ({self.steps}), got "
                f"{self.warmup_steps}; set training.warmup_steps, too"
            )


def due(every: int, step: int) -> bool:
    """Whether what is done every so many steps (0: never) is done after this one."""
    return every > 0 and step % every == 0


# What may change when a run is resumed: none of it changes what is learnt, but for rounding.
FREE_SETTINGS = (
    "description",
    "data.workers",
    "training.evaluate_every",
    "training.evaluation_tokens",
    "training.position_loss_every",
    "training.memory_statistics_every",
    "training.checkpoint_every",
    "training.keep_last",
    "training.keep_every",
    "training.write_behind",
    "training.accumulation",
    "training.trackers",
    "training.utilization",
    "training.device",
    "training.parallel",
    "training.tables",
    "training.checkpointing",
    "training.compile",
)

MODEL_SETTINGS = (
    "backbone",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "value_head_dim",
    "intermediate_size",
    "rope_theta",
    "residual_scale",
    "mlp_token_shift",
    "initialization",
    "plan",
    "layers",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run.

    description: its name in tables; model: settings of `MeanbankConfig` under their own names, but
    for vocab_size, which the data gives. They are resolved: whatever is left out is filled in, and
    a `plan` becomes `layers`.
    """

    model: dict[str, Any]
    description: str = ""
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()

    def __post_init__(self) -> None:
        if not isinstance(self.model, dict):
            raise ValueError(f"model must be a mapping of settings, got {self.model!r}")
        for name in self.model:
            choose("setting in model:", name, MODEL_SETTINGS)
        resolved = self.model_config(vocab_size=2)
        settings = {name: getattr(resolved, name) for name in MODEL_SETTINGS if name != "plan"}
        object.__setattr__(self, "model", settings)
        if self.training.accumulation > self.data.batch_size:
            raise ValueError(
                f"training.accumulation is {self.training.accumulation}, but a batch has only "
                f"{self.data.batch_size} rows (data.batch_size)"
            )

    def model_config(self, vocab_size: int, end_of_text_id: int | None = None) -> MeanbankConfig:
        """The Hugging Face configuration; raises ValueError for a wrong setting."""
        try:
            return MeanbankConfig(
                **self.model,
                vocab_size=vocab_size,
                bos_token_id=end_of_text_id,
                eos_token_id=end_of_text_id,
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"model: {one_line(error)}") from None

    def plain(self) -> dict[str, Any]:
        """The configuration as YAML holds it."""
        return to_plain(self)


def bundled_configs() -> Path:
    """Folder of the configurations that come with meanbank."""
    return bundled("configs")


def find_config(name: str | Path) -> Path:
    """A path to a YAML file, or a bundled one's name: `quick/kvm_sqrt`, `paper/kvm-120m/kvm256`."""
    return find_yaml("configuration", name, bundled_configs())


def load_settings(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """What a YAML file (see `find_config`) says, with overrides `a.b.0.c=value` (values are YAML).

    Raises ValueError, in one line, for a file that is not there or not YAML, and for an override
    that names no place.
    """
    path = find_config(path)
    settings = read_yaml("configuration", path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a mapping with model, data and training")
    for override in overrides:
        apply_override(settings, override)
    return settings


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The run that a YAML file and overrides describe, see `load_settings`.

    Raises ValueError, in one line, also for any setting that is unknown or wrong.
    """
    path = find_config(path)
    settings = load_settings(path, overrides)
    try:
        config = build(RunConfig, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # a run must find its files again from whatever folder it is evaluated in
    return dataclasses.replace(config, data=config.data.anchored(Path.cwd()))
