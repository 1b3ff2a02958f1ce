"""Which precision sums are kept in."""

import contextlib

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, gates, norms and routing: fp32 or better."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Within it, operators take what they are given; on the meta device they do anyway."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # it knows no meta
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
