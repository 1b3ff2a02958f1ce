"""RWKV-7's place among the memories: a matrix a head, in a mixer of its own."""

import dataclasses
from typing import ClassVar

from meanbank.core.conventions import Conventions
from meanbank.core.geometry import Geometry
from meanbank.memory.base import Memory, MemoryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RWKV7(MemoryConfig, tag="rwkv7"):
    """RWKV-7 (arXiv 2503.14456): a constant state of value_head_dim x head_dim numbers a head.

    The layer is no softmax attention but `meanbank.model.rwkv7.TimeMix`. It shifts its own inputs
    and has no positions, so the settings of an address do not apply; its values may come from any
    source, and projected ones are mixed with the first RWKV-7 layer's.
    """

    has_address: ClassVar[bool] = False

    def conventions(self, backbone: Conventions) -> Conventions:
        return dataclasses.replace(
            backbone,
            rotary_fraction=0.0,
            qk_norm="none",
            token_shift="none",
            value_residual="gated",
        )

    def check(self, geometry: Geometry) -> None:
        if geometry.num_heads != geometry.num_kv_heads:
            raise ValueError(
                f"an rwkv7 layer has no grouped queries: num_key_value_heads "
                f"({geometry.num_kv_heads}) must equal num_attention_heads ({geometry.num_heads})"
            )

    def build(self, geometry: Geometry) -> Memory:
        raise TypeError("an rwkv7 layer is a mixer of its own, not a memory of softmax attention")
