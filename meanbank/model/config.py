"""`MeanbankConfig`: a model as data, in the form that Hugging Face saves."""

from typing import Any

from transformers import PreTrainedConfig

from meanbank.core.config import build, choose, to_plain
from meanbank.core.geometry import Geometry
from meanbank.model.plan import LayerPlan, expand_plan
from meanbank.values import Place


class MeanbankConfig(PreTrainedConfig):
    """Configuration of a GPTAlpha-2 model whose layers choose their memory and value source.

    hidden_size, num_hidden_layers, num_attention_heads: as in any transformer.
    num_key_value_heads: grouped queries; default num_attention_heads.
    head_dim, value_head_dim: channels a head of queries and keys, of values; default
        hidden_size / num_attention_heads, and head_dim.
    intermediate_size: MLP width; default 4 * hidden_size rounded down to a multiple of 32.
    rope_theta: base of the rotary frequencies.
    residual_scale: factor of every residual branch; default 12 / num_hidden_layers (CompleteP).
    mlp_token_shift: whether the MLP's input is shifted towards the previous token.
    initialization: "kvm" (the paper's: tiny embedding, output projections 0) or "plain"
        (embedding N(0, 0.02), head N(0, 0.5/sqrt(d)), every other matrix PyTorch's default).
    layers: one entry a layer with `memory`, `values` and `address`; or rules, all but the first
        with a `where`, which are expanded (see `meanbank.expand_plan`).
    """

    model_type = "meanbank"
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float = 10000.0
    residual_scale: float | None = None
    mlp_token_shift: bool = True
    initialization: str = "kvm"
    layers: list | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        choose("initialization", self.initialization, ("kvm", "plain"))
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
        if self.residual_scale is None:
            self.residual_scale = 12 / self.num_hidden_layers
        if self.tie_word_embeddings:
            raise ValueError("meanbank models do not tie their embeddings")
        self.layers = self._expanded([{}] if self.layers is None else list(self.layers))
        for plan in self.plans():
            self.geometry(plan)
        super().__post_init__(**kwargs)

    def _expanded(self, layers: list) -> list[dict[str, Any]]:
        """One complete entry a layer, from entries or from rules."""
        if any("where" in rule for rule in layers[1:]) or len(layers) == 1:
            return expand_plan(layers, self.num_hidden_layers)
        if len(layers) != self.num_hidden_layers:
            raise ValueError(
                f"layers has {len(layers)} entries for {self.num_hidden_layers} layers; give one "
                "each, or rules with `where`"
            )
        return [to_plain(build(LayerPlan, e, f"layers.{i}")) for i, e in enumerate(layers)]

    def plans(self) -> list[LayerPlan]:
        """The layers' plans as dataclasses."""
        return [build(LayerPlan, entry, f"layers.{i}") for i, entry in enumerate(self.layers or [])]

    def geometry(self, plan: LayerPlan) -> Geometry:
        """Sizes of a layer's attention."""
        assert self.head_dim and self.value_head_dim and self.num_key_value_heads
        return Geometry(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            key_dim=self.head_dim,
            value_dim=self.value_head_dim,
            rotary_dim=round(self.head_dim * plan.address.rotary_fraction / 2) * 2,
        )

    def places(self) -> list[Place]:
        """Where each layer stands; it refers back to the first layer with its type of memory."""
        tags = [plan.memory.tag for plan in self.plans()]
        return [
            Place(layer, self.num_hidden_layers, tags.index(tag), self.vocab_size)
            for layer, tag in enumerate(tags)
        ]

    @property
    def needs_token_ids(self) -> bool:
        """Whether some layer looks values up by token id, so that embeddings alone do not do."""
        return any(plan.values.needs_token_ids for plan in self.plans())
