"""What banks of values save in the memory of a model, and from where on their tables pay off."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from meanbank.model.attention import SoftmaxAttention
from meanbank.model.memory_plan import LONGEST, blocks_of, own_nbytes, weight_nbytes
from meanbank.model.modeling import MeanbankForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankBreakEven:
    """Where the table of a bank layer is no larger than the values that its memory need not hold.

    table: bytes of the layer's share of its table; value_weights: of the value projection that it
    has not; saved: bytes a token, values less ids. tokens: exact tokens of all sequences from which
    on it pays off. context: tokens of each of `batch` sequences from which on it does, batch_size:
    the number of sequences from which on some context does; None where there is none.
    """

    name: str
    memory: str
    table: int
    value_weights: int
    saved: int
    tokens: int
    batch: int
    context: int | None
    batch_size: int | None


def break_even(model: MeanbankForCausalLM, batch: int = 1) -> tuple[BankBreakEven, ...]:
    """Where each bank layer pays off; a table that layers share is shared out evenly."""
    layers, itemsize = list(blocks_of(model)), model.dtype.itemsize
    sharing = sum(block.reads_shared_table for block in layers)
    found = []
    for number, (plan, block) in enumerate(zip(model.config.plans(), layers, strict=True)):
        mixer = block.attention
        if not mixer.values.stores_token_ids:
            continue
        width, backbone = mixer.geometry.value_width, cast(Any, model.model)
        _, table = own_nbytes(block, f"model.layers.{number}.")
        if block.reads_shared_table:
            table = -(-backbone.shared_table.numel() * itemsize // sharing)
        saved = width * itemsize - mixer.values.stored_nbytes(model.dtype)
        weights = model.config.hidden_size * width * itemsize
        tokens = max(0, -(-(table - weights) // saved))
        context, batch_size = None, None
        if isinstance(mixer, SoftmaxAttention):
            context, batch_size = _reached(mixer.memory.held_max, tokens, batch)
        found.append(
            BankBreakEven(
                name=f"layers.{number}",
                memory=plan.memory.tag,
                table=table,
                value_weights=weights,
                saved=saved,
                tokens=tokens,
                batch=batch,
                context=context,
                batch_size=batch_size,
            )
        )
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BankSaving:
    """What the banks of a model save in its states after `tokens` tokens of `batch` sequences.

    saved: bytes of values that are left out; tables: bytes of the tables that they come from.
    of_values, of_keys_and_values: saved less tables, as a share of what all layers would hold of
    either if they projected their values, compressed rows included.
    """

    tokens: int
    batch: int
    saved: int
    tables: int
    of_values: float
    of_keys_and_values: float


def bank_saving(model: MeanbankForCausalLM, tokens: int, batch: int = 1) -> BankSaving | None:
    """What the banks of a model save in its states; None where it has none, or no attention."""
    saved = keys = values = 0
    itemsize = model.dtype.itemsize
    for block in blocks_of(model):
        mixer = block.attention
        if not isinstance(mixer, SoftmaxAttention):
            return None
        held, sizes = mixer.memory.held_max(tokens), mixer.geometry
        keys += batch * (held.exact + held.rows) * sizes.key_width * itemsize
        values += batch * (held.exact + held.rows) * sizes.value_width * itemsize
        if mixer.values.stores_token_ids:
            left_out = sizes.value_width * itemsize - mixer.values.stored_nbytes(model.dtype)
            saved += batch * held.exact * left_out
    if not saved:
        return None
    tables = weight_nbytes(model)[1]
    return BankSaving(
        tokens=tokens,
        batch=batch,
        saved=saved,
        tables=tables,
        of_values=(saved - tables) / values,
        of_keys_and_values=(saved - tables) / (keys + values),
    )


def _reached(held_max: Callable[[int], Any], tokens: int, batch: int) -> tuple[int | None, int]:
    """The context from which on `batch` sequences hold so many exact tokens, and the smallest
    batch that does at some context."""
    most, wanted = held_max(LONGEST).exact, max(1, -(-tokens // batch))
    batch_size = max(1, -(-tokens // most))
    if wanted > most:
        return None, batch_size
    low, high = 0, LONGEST  # it holds fewer, and enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if held_max(middle).exact >= wanted else (middle, high)
    return high, batch_size
