"""Record: what states keep besides what they need in order to go on."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Nothing, by default.

    undo: how many of the last tokens, at most, a state has to be able to forget again.
    provenance: whether it keeps which row of its memory each older token went into.
    """

    undo: int = 0
    provenance: bool = False


NOTHING = Record()
