"""Training recipes: optimizers, parameter groups and schedules, by name."""

from meanbank.training.recipes.base import Recipe
from meanbank.training.recipes.bov import BoVRecipe
from meanbank.training.recipes.kvm import KVMRecipe
from meanbank.training.recipes.lazy_adamw import LazyAdamW
from meanbank.training.recipes.optimizers import Optimizers
from meanbank.training.recipes.plain import PlainRecipe

__all__ = ["BoVRecipe", "KVMRecipe", "LazyAdamW", "Optimizers", "PlainRecipe", "Recipe"]
