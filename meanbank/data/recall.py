"""Associative recall: read key-value pairs among filler, then name the value of queried keys."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from meanbank.core.config import check_least
from meanbank.data.batches import IGNORED, Batch, check_rows
from meanbank.data.stages import check_fractions, stage_at, stage_ends

Filler = Literal["diverse", "repeated"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the curriculum: `fraction` of the steps, with sequences of `length` tokens.

    pairs: numbers of pairs a sequence; each batch draws one of them. filler: kinds of filler that
    batches take by turns: "diverse" is random tokens, "repeated" a few of them again and again.
    """

    fraction: float
    length: int
    pairs: tuple[int, ...]
    filler: tuple[Filler, ...] = ("diverse",)

    def __post_init__(self) -> None:
        if not self.pairs or not self.filler:
            raise ValueError("a stage needs at least one number of pairs and one kind of filler")


def _stage(fraction: float, length: int, pairs: int) -> Stage:
    return Stage(fraction=fraction, length=length, pairs=(pairs,))


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """Sizes of the task and its curriculum.

    The vocabulary is the `keys`, then the `values`, then the `fillers`, in this order of ids.
    A sequence asks for at most `queries` of its keys. `period`: tokens after which repeated filler
    repeats. `curriculum`: short sequences first; models learn nothing from the long ones alone.

    Raises ValueError for sizes that do not fit together.
    """

    keys: int = 64
    values: int = 32
    fillers: int = 16
    queries: int = 12
    period: int = 8
    curriculum: tuple[Stage, ...] = (_stage(0.3, 32, 4), _stage(0.2, 64, 8), _stage(0.5, 128, 12))

    def __post_init__(self) -> None:
        check_least(self, 1, "keys", "values", "fillers", "queries", "period", of="recall.")
        if not self.curriculum:
            raise ValueError("recall.curriculum needs at least one stage")
        check_fractions([stage.fraction for stage in self.curriculum], "recall.curriculum")
        for stage in self.curriculum:
            for pairs in stage.pairs:
                check_room(stage.length, pairs, self)

    @property
    def vocab_size(self) -> int:
        """The number of distinct tokens."""
        return self.keys + self.values + self.fillers

    def stage_ends(self, steps: int) -> list[int]:
        """The step before which each stage of the curriculum ends, in a run of `steps` steps."""
        return stage_ends([stage.fraction for stage in self.curriculum], steps)


def check_room(length: int, pairs: int, config: RecallConfig) -> None:
    """Raises ValueError unless `pairs` pairs and their queries fit in `length` tokens."""
    if not 1 <= pairs <= config.keys:
        raise ValueError(f"recall needs from 1 to {config.keys} pairs (distinct keys), got {pairs}")
    room = (length - min(config.queries, pairs)) // 2
    if pairs > room:
        raise ValueError(
            f"{pairs} pairs do not fit in {length} tokens, only {max(room, 0)}: "
            "use longer sequences or fewer pairs"
        )


def recall_batch(
    generator: torch.Generator,
    batch_size: int,
    length: int,
    pairs: int,
    config: RecallConfig,
    filler: Filler = "diverse",
) -> Batch:
    """Random sequences: (batch_size, length) each.

    The last `min(queries, pairs)` tokens are query keys, distinct and stored before, each with
    its value as the label *at the query's own position*; every other label is -100. In front of
    them pairs (a key at an even position, its value right after) lie among fillers, see `Stage`.

    Raises ValueError when the pairs do not fit.
    """
    check_room(length, pairs, config)
    queries = min(config.queries, pairs)
    slots = (length - queries) // 2
    keys = distinct(generator, batch_size, config.keys, pairs)
    positions = 2 * distinct(generator, batch_size, slots, pairs)
    values = config.keys + integers(generator, config.values, batch_size, pairs)
    fillers = _FILLERS[filler](generator, batch_size, length, config)

    input_ids = config.keys + config.values + fillers
    input_ids.scatter_(1, positions, keys)
    input_ids.scatter_(1, positions + 1, values)
    # The pairs come in random order, so the first of them are a random choice.
    input_ids[:, length - queries :] = keys[:, :queries]
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, length - queries :] = values[:, :queries]
    return Batch(input_ids=input_ids, labels=labels)


def integers(generator: torch.Generator, below: int, *shape: int) -> torch.Tensor:
    """From 0 on, where the generator is, whatever PyTorch's default device."""
    return torch.randint(below, shape, generator=generator, device=generator.device)


def _diverse(
    generator: torch.Generator, batch_size: int, length: int, config: RecallConfig
) -> torch.Tensor:
    return integers(generator, config.fillers, batch_size, length)


def _repeated(
    generator: torch.Generator, batch_size: int, length: int, config: RecallConfig
) -> torch.Tensor:
    once = _diverse(generator, batch_size, config.period, config)
    return once.repeat(1, -(-length // config.period))[:, :length]


_FILLERS = {"diverse": _diverse, "repeated": _repeated}
assert tuple(_FILLERS) == get_args(Filler)


def seeded(*numbers: int) -> torch.Generator:
    """A generator whose seed is made of all the numbers, none of them negative."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def distinct(generator: torch.Generator, rows: int, choices: int, count: int) -> torch.Tensor:
    """`count` distinct numbers below `choices` in random order for each row: (rows, count)."""
    draws = torch.rand(rows, choices, generator=generator, device=generator.device)
    return draws.argsort(dim=1)[:, :count]


class RecallBatches:
    """Batches of the curriculum over `steps` steps, a pure function of seed and step."""

    def __init__(self, config: RecallConfig, *, batch_size: int, seed: int, steps: int):
        if batch_size < 1 or steps < 1:
            raise ValueError(
                f"recall needs at least one row and one step, got batch_size {batch_size}, "
                f"steps {steps}"
            )
        self.config = config
        self.batch_size = batch_size
        self._seed = seed
        self._ends = config.stage_ends(steps)

    def stage(self, step: int) -> Stage:
        """The stage of the curriculum at a step; after the last step the last stage stays."""
        return self.config.curriculum[stage_at(self._ends, step)]

    def rows_at(self, step: int) -> int:
        """The number of rows of the batch of a step."""
        return self.batch_size

    def batch(self, step: int) -> Batch:
        """The batch of this step, counted from 0: (batch_size, length of its stage)."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, first: int, count: int) -> Batch:
        """`count` rows of the batch of this step, from row `first` on, as `TextBatches` has them.

        All of the batch is made: a row's numbers depend on those before it.
        """
        check_rows(step, first, count, self.batch_size)
        stage = self.stage(step)
        generator = seeded(self._seed, step)
        pairs = stage.pairs[0]
        if len(stage.pairs) > 1:
            pairs = stage.pairs[int(integers(generator, len(stage.pairs)))]
        filler = stage.filler[step % len(stage.filler)]
        batch = recall_batch(generator, self.batch_size, stage.length, pairs, self.config, filler)
        return batch.rows(first, count)
