"""Options that take several `KEY=VALUE`, and may be repeated."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated

import tyro

Overrides = Annotated[
    tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(metavar="KEY=VALUE")
]


def listed(overrides: Sequence[Sequence[str]]) -> list[str]:
    """All of them, one after the other."""
    return list(chain.from_iterable(overrides))
