"""What each parameter is for, by its name: the one place where parameters are told apart."""

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn


class Role(enum.Enum):
    """What a parameter is for.

    EMBEDDING, HEAD: token embedding and output head.
    MATRIX: any other matrix that a vector is multiplied with.
    LOW_RANK: the second factor of a low-rank map, from its rank to the full width.
    VECTOR: norms, token shifts, temperatures, biases and other parameters of fewer dimensions.
    SMEAR: gate and mix of the nanochat stem.
    VALUE_GATE: gate of a table that is added to projected values.
    TABLE: values by token id, of one layer or shared by many.
    SCALE: gamma, one factor of a layer's values; HEAD_SCALE: lambda, one factor a head.
    CONTEXTUAL_WEIGHT, OTHER_WEIGHT: a and b of the mixture `a contextual + b other`.
    """

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    LOW_RANK = "low-rank factor"
    VECTOR = "vector"
    SMEAR = "smear"
    VALUE_GATE = "value gate"
    TABLE = "table"
    SCALE = "scale"
    HEAD_SCALE = "head scale"
    CONTEXTUAL_WEIGHT = "contextual weight"
    OTHER_WEIGHT = "other weight"


ATTENTION = r"model\.layers\.\d+\.attention"
VALUES = ATTENTION + r"\.values(\.\w+)*"

# Role, its whole name, and its dimensions where the name leaves it open. No two lines meet.
NAMED: list[tuple[Role, str, int | None]] = [
    (Role.EMBEDDING, r"model\.embedding\.weight", None),
    (Role.HEAD, r"lm_head\.weight", None),
    (Role.SMEAR, r"model\.stem\.(gate\.weight|mix)", None),
    (Role.TABLE, VALUES + r"\.table|model\.shared_table", None),
    (Role.SCALE, VALUES + r"\.scale", 0),
    (Role.HEAD_SCALE, VALUES + r"\.scale", 1),
    (Role.CONTEXTUAL_WEIGHT, VALUES + r"\.contextual_weight", None),
    (Role.OTHER_WEIGHT, VALUES + r"\.other_weight", None),
    (Role.VALUE_GATE, VALUES + r"\.gate\.weight", None),
    (Role.LOW_RANK, ATTENTION + r"(\.\w+)+\.up\.weight", None),
    (Role.VECTOR, ATTENTION + r"\.bonus", None),  # one vector a head (RWKV-7's r_k)
]


def role_of(name: str, parameter: Tensor) -> Role:
    """Role of a parameter of `MeanbankForCausalLM`; ValueError where its name says nothing.

    What the table does not name is a vector below two dimensions and a matrix where it is the
    `weight` of a linear map.
    """
    for role, pattern, dimensions in NAMED:
        if dimensions in (None, parameter.ndim) and re.fullmatch(pattern, name):
            return role
    if parameter.ndim < 2:
        return Role.VECTOR
    if parameter.ndim == 2 and name.endswith(".weight"):
        return Role.MATRIX
    raise ValueError(f"{name} has no role; give it one in {__name__}")


class Member(NamedTuple):
    """A trainable parameter of a model."""

    name: str
    parameter: nn.Parameter
    role: Role


def members_of(model: nn.Module) -> list[Member]:
    """All trainable parameters, in the model's order."""
    return [
        Member(name, parameter, role_of(name, parameter))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def pick(members: Iterable[Member], *roles: Role) -> list[Member]:
    """Those with one of these roles, in the same order."""
    return [member for member in members if member.role in roles]
