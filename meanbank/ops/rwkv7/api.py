"""`rwkv7_recurrence`: checks its arguments and picks a backend."""

import functools

import torch
from torch import Tensor

from meanbank.core.config import choose
from meanbank.core.precision import without_autocast
from meanbank.ops.rwkv7.chunked import rwkv7_chunked
from meanbank.ops.rwkv7.reference import rwkv7_reference

BACKENDS = {"chunked": rwkv7_chunked, "reference": rwkv7_reference}


def rwkv7_recurrence(
    receptance: Tensor,
    log_decay: Tensor,
    key: Tensor,
    value: Tensor,
    removal_key: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The matrix-valued memory of RWKV-7: decay, remove, write, read, for each head.

    RWKV-7 "Goose" (arXiv 2503.14456, section 4). With decay `w = exp(log_decay)`, removal key kk
    and in-context learning rate a, for each token

        S_t = S_{t-1} diag(w_t) - (S_{t-1} kk_t) (kk_t * a_t)^T + v_t k_t^T,    o_t = S_t r_t.

    The paper and flash-linear-attention call the arguments r, w, k, v, and pass `a = -kk` and
    `b = kk * a` for the last two; the latter stores the transpose of S.

    >>> r, k, v, kk = torch.randn(4, 1, 2, 100, 64)  # batch 1, 2 heads, 100 tokens
    >>> log_decay = -math.exp(-0.5) * torch.rand(1, 2, 100, 64)
    >>> kk, rate = F.normalize(kk, dim=-1), torch.rand(1, 2, 100, 64)
    >>> output, state = rwkv7_recurrence(r, log_decay, k, v, kk, rate)

    Args:
        receptance: (B, H, T, Dk) r, what is read.
        log_decay: (B, H, T, Dk), at most 0. RWKV-7 keeps it in [-exp(-0.5), 0]; the chunked
            backend needs at least -2.5; below, its factors overflow and outputs are NaN.
        key: (B, H, T, Dk) k, where the value is written.
        value: (B, H, T, Dv) v.
        removal_key: (B, H, T, Dk) kk, of norm 1 in RWKV-7: where old content is removed.
        rate: (B, H, T, Dk) a in [0, 1]: how much of it, for each channel.
        state: (B, H, Dv, Dk) what an earlier call returned; None is zero.
        backend: "chunked", "reference" (token by token) or "auto", which is chunked for more
            than one token.

    Returns:
        Outputs (B, H, T, Dv) in the dtype of `value`, and the last state (B, H, Dv, Dk). Both are
        computed in fp32 or better, and the state keeps that.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an unknown backend.
    """
    inputs = {
        "receptance": receptance,
        "log_decay": log_decay,
        "key": key,
        "value": value,
        "removal_key": removal_key,
        "rate": rate,
    }
    _check(inputs, state)
    if backend == "auto":
        backend = "chunked" if key.shape[2] > 1 else "reference"
    function = BACKENDS[choose("backend", backend, ["auto", *BACKENDS])]
    if state is None:
        state = value.new_zeros(*value.shape[:2], value.shape[3], key.shape[3])
    dtypes = (tensor.dtype for tensor in inputs.values())
    precise = functools.reduce(torch.promote_types, dtypes, torch.float32)
    with without_autocast(value.device):
        output, last = function(*(x.to(precise) for x in (*inputs.values(), state)))
    return output.to(value.dtype), last


def _check(inputs: dict[str, Tensor], state: Tensor | None) -> None:
    key, value = inputs["key"], inputs["value"]
    for name, tensor in inputs.items():
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point tensor (batch, heads, tokens, channels), got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        expected = key.shape[:3] if name == "value" else key.shape
        if tensor.shape[: len(expected)] != expected:
            raise ValueError(
                f"{name} must agree with key, of shape {tuple(key.shape)}, got "
                f"{tuple(tensor.shape)}"
            )
    if key.shape[2] == 0:
        raise ValueError("at least one token is needed, got none")
    expected = (*key.shape[:2], value.shape[3], key.shape[3])
    if state is not None and (state.shape != expected or not state.is_floating_point()):
        raise ValueError(
            f"state must be a floating-point tensor of shape {expected}, got {state.dtype} of "
            f"shape {tuple(state.shape)}: it belongs to other sizes or another batch"
        )
