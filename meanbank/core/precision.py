"""Which precision sums are kept in."""

import torch


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, gates, norms and routing: fp32 or better."""
    return torch.promote_types(dtype, torch.float32)
