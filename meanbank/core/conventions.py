"""Conventions: what a layer does where its plan leaves a setting open, and what labels mean."""

import dataclasses
from typing import Literal

TokenShift = Literal["learned", "none"]
QKNorm = Literal["per_head", "none"]
ValueResidual = Literal["gated", "linear", "none"]

IGNORED = -100  # a label that is no target, as in PyTorch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conventions:
    """A backbone's habits; a memory may change them for its own layers.

    rotary_fraction: channels of queries and keys that are rotated by position, at base rope_theta.
    qk_norm: whether each head's queries and keys are normalised, as the backbone normalises.
    token_shift: a learned step of queries, keys and projected values towards the previous token.
    value_residual: how projected values take up those of the first layer of the same memory.
    """

    rotary_fraction: float
    rope_theta: float
    qk_norm: QKNorm
    token_shift: TokenShift
    value_residual: ValueResidual
