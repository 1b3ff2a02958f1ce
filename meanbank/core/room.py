"""Room: tensors that grow at their end without being copied for each token.

`appended` gives what `torch.cat` does. What it gives may have spare slots behind it, and appending
to that very tensor writes the new tokens there. Tensors stay values all the same: a slot is written
once, so whoever appends first gets the slots, and another continuation of the same tensor, like
one of an older tensor, a copy, a selection or a part of it, copies and gets slots of its own.
"""

import torch
from torch import Tensor


def appended(
    tensor: Tensor, new: Tensor, dim: int, block: int, *, channels_first: bool = False
) -> Tensor:
    """`tensor` and then `new` in dimension `dim`, which is not negative.

    Spare slots never pass the next multiple of `block`; there are none where gradients are
    recorded. channels_first: the last two dimensions stand in memory the other way round.
    """
    if torch.is_grad_enabled():
        return torch.cat([tensor, new], dim)
    length = tensor.shape[dim]
    total = length + new.shape[dim]
    # by slots in use and layout; taking the buffer out is what makes one continuation the owner
    room: dict[tuple[int, bool], Tensor] = getattr(tensor, "room", {})
    buffer = room.pop((length, channels_first), None)
    if buffer is None or total > buffer.shape[dim] or _is_frozen(buffer):
        room, shape = {}, list(tensor.shape)
        shape[dim] = -(-total // block) * block
        if channels_first:
            shape[-2:] = reversed(shape[-2:])
        buffer = tensor.new_zeros(shape)  # spare slots may be read, with weight 0
        buffer = buffer.mT if channels_first else buffer
        buffer.narrow(dim, 0, length).copy_(tensor)
    buffer.narrow(dim, length, total - length).copy_(new)
    whole = buffer.data.narrow(dim, 0, total)  # what autograd saves of it, no later token changes
    room[total, channels_first] = buffer
    setattr(whole, "room", room)  # noqa: B010
    return whole


def without_room(tensor: Tensor) -> Tensor:
    """The same numbers with no slots behind them, copied only if there are some."""
    return tensor.clone() if hasattr(tensor, "room") else tensor


def spare_nbytes(tensor: Tensor) -> int:
    """Bytes of the slots behind a tensor that `appended` gave; 0 for others."""
    if not hasattr(tensor, "room"):
        return 0
    return tensor.untyped_storage().nbytes() - tensor.numel() * tensor.element_size()


def _is_frozen(buffer: Tensor) -> bool:
    """Tensors of inference mode cannot be written outside."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()
