"""The RWKV-7 recurrence token by token: the specification of the operator.

Source: Peng et al., "RWKV-7 Goose", arXiv 2503.14456, section 4. Shapes as in `api.py`.
"""

import torch
from torch import Tensor


def rwkv7_reference(
    receptance: Tensor,
    log_decay: Tensor,
    key: Tensor,
    value: Tensor,
    removal_key: Tensor,
    rate: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `meanbank.ops.rwkv7.rwkv7_recurrence`, which checks the arguments."""
    outputs = []
    decay, replaced = log_decay.exp(), removal_key * rate
    for token in range(key.shape[2]):
        r, w, k, v, kk, b = (
            x[:, :, token, :, None] for x in (receptance, decay, key, value, removal_key, replaced)
        )
        removed = state @ kk  # (B, H, Dv, 1): what the memory holds under the removal key
        state = state * w.mT - removed @ b.mT + v @ k.mT
        outputs.append((state @ r)[..., 0])
    return torch.stack(outputs, dim=2), state
