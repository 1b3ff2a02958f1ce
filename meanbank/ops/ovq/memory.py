"""The state of OVQ attention: a dictionary of means and the chunk that it has not seen yet."""

import dataclasses

from torch import Tensor

from meanbank.core.state import State
from meanbank.ops.windowed import WindowedMemory


@dataclasses.dataclass(frozen=True)
class OVQRows(State):
    """The dictionary, in fp32 or better.

    key: (B, Hkv, M, Dk) means of the normalised keys that went to each row.
    value: (B, Hkv, M, Dv) means of their values.
    count: (B, Hkv, M) how many those were, at least 1.
    """

    part = "rows"

    key: Tensor
    value: Tensor
    count: Tensor

    @property
    def size(self) -> int:
        return self.key.shape[2]


@dataclasses.dataclass(frozen=True)
class OVQMemory(WindowedMemory):
    """Everything `ovq_attention` needs in order to go on after `seen` tokens.

    rows: the dictionary; None until a token has arrived after the first chunk.
    window_key: (B, Hkv, L, Dk) normalised keys of the current chunk, L = 1 to chunk_size.
    window_value: (B, Hkv, L, Dv); None when the caller stores values in a form of its own and
        puts them back before the next call.
    seen: tokens seen so far.

    The update is lazy: at rest on a chunk boundary the whole chunk is still pending, and the
    dictionary only takes it in when a further token arrives.
    """

    rows: OVQRows | None
    window_key: Tensor
    window_value: Tensor | None
    seen: int
