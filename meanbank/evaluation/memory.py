"""Bytes of memory against context, in closed form."""

from collections.abc import Iterable
from typing import Any

from meanbank.model import MeanbankForCausalLM
from meanbank.model.roles import Role, role_of

CONTEXTS = tuple(2**k for k in range(10, 21))


def memory_at_contexts(
    model: MeanbankForCausalLM, *, contexts: Iterable[int] = CONTEXTS, batch: int = 1
) -> dict[str, Any]:
    """Most bytes that the states of all layers hold after so many tokens, in the model's dtype.

    Includes the small shift tails. Bank tables are parameters: they are reported apart, since they
    do not grow with the context and are shared by all sequences.
    """
    return {
        "batch": batch,
        "contexts": [
            {"tokens": tokens, "bytes": model.model.memory_nbytes_max(tokens, batch)}
            for tokens in contexts
        ],
        "table_bytes": sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if role_of(name, parameter) is Role.TABLE
        ),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
