"""`ovq_attention`: checks its arguments and runs the operator."""

from collections.abc import Callable

import torch
from torch import Tensor

from meanbank.core.precision import without_autocast
from meanbank.ops.checks import check_attention, check_carried, check_per_head
from meanbank.ops.ovq.memory import OVQMemory
from meanbank.ops.ovq.reference import ovq_attention_reference


def ovq_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    temperature: Tensor,
    *,
    chunk_size: int,
    budget: Callable[[int], float],
    memory: OVQMemory | None = None,
    return_memory: bool = False,
    trace: list[Tensor] | None = None,
) -> Tensor | tuple[Tensor, OVQMemory]:
    """Causal attention over the current chunk and a dictionary of all earlier ones.

    Online vector quantisation (Alonso, Figliolia and Millidge, arXiv 2602.03922) as the baseline
    of Key-Value Means (arXiv 2605.09877). Queries and keys are divided by their norm + 1e-5. A
    query sees its own aligned block of `chunk_size` tokens, up to itself, and every dictionary
    row, in one softmax of `temperature * sqrt(Dk) * q.k + log count`, where tokens count 1. When a
    token arrives after a whole chunk, the dictionary takes that chunk in: as many tokens as the
    budget allows, those least similar to its rows, become rows of their own, the least similar
    first; each other one moves the mean of its most similar earlier row. Similarities that differ
    by no more than rounding noise (2 eps times the norms) are ties, which go to the earlier token
    and the lower row.

    >>> query, key, value = torch.randn(3, 1, 4, 1000, 64)  # batch 1, 4 heads, 1000 tokens
    >>> output = ovq_attention(
    ...     query, key, value, torch.ones(4), chunk_size=64,
    ...     budget=lambda seen: seen * 128 // (seen + 128))

    Args:
        query: (B, H, T, Dk) as projected.
        key: (B, Hkv, T, Dk) as projected; Hkv divides H.
        value: (B, Hkv, T, Dv).
        temperature: (H,) factor of the logits, beta in the paper.
        chunk_size: block length in tokens.
        budget: rows wanted after that many tokens seen, rounded down. The dictionary never
            shrinks, has at least one row, and never more than tokens.
        memory: what an earlier call returned, to go on from there; its `seen` says how far it is.
        return_memory: also return the memory after the T tokens.
        trace: a list that collects, for each chunk taken in, the row (B, Hkv, C) that each of its
            tokens went into, its own or another's.

    Returns:
        (B, H, T, Dv) in the dtype of `value`, or that and the memory. Norms, means, counts and
        routing are in fp32 or better whatever the inputs; which row a token goes to has no
        gradient, means have.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together.
    """
    check_attention(query, key, value)
    check_per_head("temperature", temperature, query)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    if not callable(budget):
        raise ValueError(f"budget must be a function of the tokens seen, got {budget!r}")
    if memory is not None:
        start = (memory.seen - 1) // chunk_size * chunk_size  # of the chunk that is pending
        check_carried(memory, memory.seen - start, f"chunk_size {chunk_size}", key, value)
    with without_autocast(query.device):  # routing must not drop to half
        common = torch.promote_types(query.dtype, key.dtype)
        output, new_memory = ovq_attention_reference(
            query.to(common), key.to(common), value, temperature, chunk_size, budget, memory, trace
        )
    return (output, new_memory) if return_memory else output
