"""Training: configurations, recipes, the loop, run folders."""

from meanbank.training.config import RunConfig, TrainingConfig, load_config
from meanbank.training.finite import NonFiniteError
from meanbank.training.recipes import BoVRecipe, KVMRecipe, LazyAdamW, PlainRecipe, Recipe
from meanbank.training.run import LoadedRun, load_model, load_run
from meanbank.training.signals import Interrupted
from meanbank.training.trainer import train
from meanbank.training.writer import CheckpointError

__all__ = [
    "BoVRecipe",
    "CheckpointError",
    "Interrupted",
    "KVMRecipe",
    "LazyAdamW",
    "LoadedRun",
    "NonFiniteError",
    "PlainRecipe",
    "Recipe",
    "RunConfig",
    "TrainingConfig",
    "load_config",
    "load_model",
    "load_run",
    "train",
]
