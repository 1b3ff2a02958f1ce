"""Checks of arguments that attention operators share; each raises ValueError in one line."""

import math
from typing import Any

from torch import Tensor


def check_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Shapes and dtypes of query (B, H, T, Dk), key (B, Hkv, T, Dk) and value (B, Hkv, T, Dv)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point tensor (batch, heads, tokens, channels), got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must agree in batch, heads and tokens, got {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        raise ValueError(
            f"query and key must agree in batch, tokens and channels, got {tuple(query.shape)} "
            f"and {tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the number of query heads ({query.shape[1]}) must be a multiple of the number of "
            f"key heads ({key.shape[1]})"
        )
    if query.shape[2] == 0:
        raise ValueError("at least one token is needed, got none")
    if not query.numel() or not value.numel():
        shapes = f"{tuple(query.shape)} and {tuple(value.shape)}"
        raise ValueError(f"query and value must not be empty, got shapes {shapes}")


def check_per_head(name: str, tensor: Tensor, query: Tensor) -> None:
    """One number for each query head."""
    if tensor.shape != (query.shape[1],):
        raise ValueError(
            f"{name} must have one entry for each of the {query.shape[1]} query heads, got shape "
            f"{tuple(tensor.shape)}"
        )


def whole_rows(wanted: float, seen: int) -> int:
    """The rows that a budget gives after that many tokens, rounded down."""
    if not math.isfinite(wanted):
        raise ValueError(f"budget must give a number of rows, got {wanted} after {seen} tokens")
    return int(wanted)


def check_carried(memory: Any, held: int, settings: str, key: Tensor, value: Tensor) -> None:
    """A memory that an operator carries on: its window of `held` tokens, and its rows.

    settings: those that decide how many tokens a window holds, for the message.
    """
    if memory.window_length != held:
        raise ValueError(
            f"the memory holds a window of {memory.window_length} tokens after {memory.seen}, "
            f"which {settings} cannot give: it was made with other settings"
        )
    window = (*key.shape[:2], held)
    if memory.window_key.shape != (*window, key.shape[3]):
        raise ValueError(
            f"the memory's window keys have shape {tuple(memory.window_key.shape)}, expected "
            f"{(*window, key.shape[3])}: it belongs to other sizes or another batch"
        )
    if (memory.rows is None) != (held == memory.seen):
        has = "some" if memory.rows is not None else "no"
        raise ValueError(f"the memory has {has} rows after {memory.seen} tokens")
    if memory.rows is not None and (
        memory.rows.key.shape[:2] != key.shape[:2] or memory.rows.value.shape[3] != value.shape[3]
    ):
        raise ValueError("the memory's rows belong to other sizes or another batch")
    values = memory.window_value
    if values is None or values.shape != (*window, value.shape[3]):
        raise ValueError("the memory holds no window values of the right size; put them back first")
