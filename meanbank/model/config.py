"""`MeanbankConfig`: a model as data, in the form that Hugging Face saves."""

import dataclasses
import math
from typing import Any

from transformers import PreTrainedConfig

from meanbank.core.config import build, choose, to_plain
from meanbank.core.geometry import Geometry
from meanbank.model.backbone import Backbone
from meanbank.model.backbones import BACKBONES
from meanbank.model.plan import AddressPlan, LayerPlan, expand_plan, first_layers
from meanbank.values import Place

INITIALIZATIONS = ("paper", "plain")


class MeanbankConfig(PreTrainedConfig):
    """Configuration of a model whose layers choose their memory and value source.

    backbone: "gptalpha2" (KVM paper) or "nanochat" (BoV paper); what is left out follows it.
    hidden_size, num_hidden_layers, num_attention_heads: as in any transformer.
    num_key_value_heads: grouped queries; default num_attention_heads.
    head_dim, value_head_dim: channels a head of queries and keys, of values; default
        hidden_size / num_attention_heads, and head_dim.
    intermediate_size: MLP width; default 4 * hidden_size rounded down to a multiple of 32.
    rope_theta: base of the rotary frequencies; default 1e4, on nanochat 1e5.
    residual_scale: factor of every residual branch; default 12 / num_hidden_layers (CompleteP), on
        nanochat 1.
    mlp_token_shift: whether the MLP's input is shifted towards the previous token; default true,
        on nanochat false.
    initialization: "paper" (the backbone's own, output projections 0) or "plain" (embedding
        N(0, 0.02), head N(0, 0.5/sqrt(d)), every other matrix PyTorch's default).
    plan: the layers as rules, see `meanbank.expand_plan`; default KVM with projected values.
    layers: the layers one by one, in place of a plan: an entry each with any of `memory`, `values`
        and `address`. A plan is expanded into this, completely, and only this is saved.

    Raises ValueError, in one line, for a setting that is wrong or does not fit the others.
    """

    model_type = "meanbank"
    keys_to_ignore_at_inference = ["cache"]

    backbone: str = "gptalpha2"
    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    residual_scale: float | None = None
    mlp_token_shift: bool | None = None
    initialization: str = "paper"
    plan: list | None = None
    layers: list | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        choose("backbone", self.backbone, BACKBONES)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            _check_size(name, getattr(self, name))
        self._fill_in()
        for name in ("num_key_value_heads", "head_dim", "value_head_dim", "intermediate_size"):
            _check_size(name, getattr(self, name))
        for name in ("rope_theta", "residual_scale"):
            _check_positive(name, getattr(self, name))
        if not isinstance(self.mlp_token_shift, bool):
            raise ValueError(f"mlp_token_shift must be true or false, got {self.mlp_token_shift!r}")
        choose("initialization", self.initialization, INITIALIZATIONS)
        if self.tie_word_embeddings:
            raise ValueError("meanbank models do not tie their embeddings")
        self.layers, self.plan = self._expanded(), None
        plans = self.plans()
        for layer, (plan, first) in enumerate(
            zip(plans, first_layers([plan.memory for plan in plans]), strict=True)
        ):
            plan.memory.check(self.geometry(plan))
            if not plan.memory.has_address and plan.address != self._open_address(plan):
                raise ValueError(
                    f"layers.{layer}.address: a layer with {plan.memory.tag} has no address, so "
                    "nothing can be set there"
                )
            source = plan.values.takes_over(first)
            if source is not None and source >= layer:
                raise ValueError(
                    f"layers.{layer}.values: layer {layer} cannot take over the values of layer "
                    f"{source}, only those of an earlier one"
                )
        super().__post_init__(**kwargs)

    def _fill_in(self) -> None:
        """Settings that follow from others."""
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) is not divisible by num_attention_heads "
                    f"({self.num_attention_heads}); change one of them or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.intermediate_size is None:
            self.intermediate_size = max(32, 4 * self.hidden_size // 32 * 32)
        backbone = self.backbone_parts
        if self.residual_scale is None:
            self.residual_scale = backbone.residual_scale(self.num_hidden_layers)
        if self.rope_theta is None:
            self.rope_theta = backbone.conventions.rope_theta
        if self.mlp_token_shift is None:
            self.mlp_token_shift = backbone.mlp_token_shift

    def _expanded(self) -> list[dict[str, Any]]:
        """One complete entry a layer."""
        if self.plan is not None and self.layers is not None:
            raise ValueError("give either plan or layers, not both")
        if self.layers is None:
            rules: list[Any] = [{}] if self.plan is None else self.plan
            self.layers = expand_plan(rules, self.num_hidden_layers)
        elif not isinstance(self.layers, list) or len(self.layers) != self.num_hidden_layers:
            raise ValueError(
                f"layers must be a list with an entry for each of {self.num_hidden_layers} layers; "
                "rules go to plan"
            )
        conventions = self.backbone_parts.conventions
        plans = [build(LayerPlan, entry, f"layers.{i}") for i, entry in enumerate(self.layers)]
        first = first_layers([plan.memory for plan in plans])
        plans = [plan.resolved(conventions, at) for plan, at in zip(plans, first, strict=True)]
        return [to_plain(plan) for plan in plans]

    def _open_address(self, plan: LayerPlan) -> AddressPlan:
        """The address of a layer whose plan says nothing about it."""
        conventions = plan.memory.conventions(self.backbone_parts.conventions)
        return AddressPlan(rope_theta=self.rope_theta).resolved(conventions)

    @property
    def backbone_parts(self) -> Backbone:
        """What its backbone is made of."""
        return BACKBONES[self.backbone]

    def plans(self) -> list[LayerPlan]:
        """The layers' plans as dataclasses, the base of rotary frequencies filled in."""
        plans = [
            build(LayerPlan, entry, f"layers.{i}") for i, entry in enumerate(self.layers or [])
        ]
        return [plan.with_theta(self.rope_theta or 0.0) for plan in plans]

    def geometry(self, plan: LayerPlan) -> Geometry:
        """Sizes of a layer's attention."""
        assert self.head_dim and self.value_head_dim and self.num_key_value_heads
        assert plan.address.rotary_fraction is not None
        pairs = round(self.head_dim * plan.address.rotary_fraction / 2)
        pairs = min(pairs, self.head_dim // 2)  # an odd head has a channel left over
        return Geometry(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            key_dim=self.head_dim,
            value_dim=self.value_head_dim,
            rotary_dim=2 * pairs,
        )

    def places(self) -> list[Place]:
        """Where each layer stands; it refers back to the first layer with its type of memory."""
        plans = self.plans()
        places = [
            Place(layer, self.num_hidden_layers, first, self.vocab_size)
            for layer, first in enumerate(first_layers([plan.memory for plan in plans]))
        ]
        refer = (plan.values.refers_to(at) for plan, at in zip(plans, places, strict=True))
        referred_to = frozenset().union(*refer)
        return [dataclasses.replace(at, publishes=at.layer in referred_to) for at in places]

    @property
    def has_shared_table(self) -> bool:
        """Whether layers read a table over token ids in common."""
        return any(plan.values.uses_shared_table for plan in self.plans())

    @property
    def needs_token_ids(self) -> bool:
        """Whether some layer looks values up by token id, so that embeddings alone do not do."""
        return any(plan.values.needs_token_ids for plan in self.plans())


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive, got {value!r}")
