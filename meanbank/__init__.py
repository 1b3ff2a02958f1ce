"""Key-Value Means and Bank of Values: memory-efficient attention for long contexts."""

from meanbank import ops
from meanbank.model import (
    LayerPlan,
    MeanbankCache,
    MeanbankConfig,
    MeanbankForCausalLM,
    MeanbankModel,
    batch_invariant,
    expand_plan,
    layers_at,
)

__version__ = "0.1.0"

__all__ = [
    "LayerPlan",
    "MeanbankCache",
    "MeanbankConfig",
    "MeanbankForCausalLM",
    "MeanbankModel",
    "__version__",
    "batch_invariant",
    "expand_plan",
    "layers_at",
    "ops",
]
