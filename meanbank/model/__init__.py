"""Models: a layer plan as data, the backbone, and the Hugging Face classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from meanbank.model.cache import MeanbankCache
from meanbank.model.config import MeanbankConfig
from meanbank.model.invariance import batch_invariant
from meanbank.model.modeling import MeanbankForCausalLM, MeanbankModel
from meanbank.model.plan import LayerPlan, expand_plan, layers_at
from meanbank.model.table_gradients import set_table_gradients

AutoConfig.register("meanbank", MeanbankConfig, exist_ok=True)
AutoModel.register(MeanbankConfig, MeanbankModel, exist_ok=True)
AutoModelForCausalLM.register(MeanbankConfig, MeanbankForCausalLM, exist_ok=True)

__all__ = [
    "LayerPlan",
    "MeanbankCache",
    "MeanbankConfig",
    "MeanbankForCausalLM",
    "MeanbankModel",
    "batch_invariant",
    "expand_plan",
    "layers_at",
    "set_table_gradients",
]
