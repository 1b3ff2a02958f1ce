"""Claims of a study."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimSpec:
    """A claim as a study file has it."""

    claim: str
    says: str = ""
    source: str = ""
    expected: str = "holds"
    each: bool = False
