"""The sizes of an attention layer."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one attention layer.

    `num_heads` query heads share `num_kv_heads` key/value heads (grouped queries); keys and queries
    have `key_dim` channels a head, values `value_dim`; the first `rotary_dim` channels of queries
    and keys are rotated by position.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.key_dim:
            raise ValueError(
                f"the rotary channels must be an even number between 0 and {self.key_dim}, "
                f"got {self.rotary_dim}"
            )

    @property
    def key_width(self) -> int:
        """Channels of all key heads together."""
        return self.num_kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads together."""
        return self.num_kv_heads * self.value_dim


def split_heads(x, num_heads: int):
    """(B, T, num_heads * D) -> (B, num_heads, T, D)."""
    batch, length, width = x.shape
    return x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(x):
    """(B, H, T, D) -> (B, T, H * D)."""
    return x.transpose(1, 2).flatten(2)
