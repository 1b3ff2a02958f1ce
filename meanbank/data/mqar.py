"""Multi-query associative recall: pairs first, then every key is asked for once, among filler."""

from dataclasses import dataclass
from typing import Literal

import torch

from meanbank.data.batches import IGNORED, Batch
from meanbank.data.recall import distinct, integers


@dataclass(frozen=True, kw_only=True)
class MqarConfig:
    """The vocabulary, laid out as in `RecallConfig`, and how queries lie.

    power_a: a gap of g query places has the weight g ** (power_a - 1): 1 is uniform, near 0 most
    queries follow soon. non_queries: what stands between queries, random fillers or one filler.

    Raises ValueError for sizes that make no task.
    """

    keys: int = 64
    values: int = 32
    fillers: int = 16
    power_a: float = 0.01
    non_queries: Literal["random", "constant"] = "random"

    def __post_init__(self) -> None:
        for name in ("keys", "values", "fillers", "power_a"):
            if getattr(self, name) <= 0:
                raise ValueError(f"mqar.{name} must be positive, got {getattr(self, name)}")


def check_pairs(length: int, pairs: int, config: MqarConfig) -> None:
    """Raises ValueError unless `pairs` pairs and their queries fit in `length` tokens."""
    most = min(config.keys, config.values)
    if not 1 <= pairs <= most:
        raise ValueError(
            f"mqar needs from 1 to {most} pairs (distinct keys and distinct values), got {pairs}"
        )
    if 4 * pairs > length:
        raise ValueError(
            f"{pairs} pairs and their queries take {4 * pairs} tokens, got {length}: use longer "
            "sequences or fewer pairs"
        )


def mqar_batch(
    generator: torch.Generator, batch_size: int, length: int, pairs: int, config: MqarConfig
) -> Batch:
    """Random sequences: (batch_size, length) each.

    The first 2 `pairs` tokens are a key and its value in turn, all distinct. Of the rest every
    second token is a place for a query: each key stands at one of them, with its value as the label
    *at the query's own position*; every other label is -100. Places are drawn without replacement,
    for one key after the other, with weights that fall with the gap as `config.power_a` says.

    This is the task of Zoology (Arora et al. 2023, arXiv 2312.04927) but for what stands between
    queries: there it is any token of the vocabulary, so keys too; here fillers only.

    Raises ValueError when the pairs do not fit.
    """
    check_pairs(length, pairs, config)
    keys = distinct(generator, batch_size, config.keys, pairs)
    values = config.keys + distinct(generator, batch_size, config.values, pairs)
    positions = 2 * pairs + 2 * _gaps(generator, batch_size, length, pairs, config.power_a)

    input_ids = keys.new_full((batch_size, length), config.keys + config.values)
    if config.non_queries == "random":
        input_ids += integers(generator, config.fillers, batch_size, length)
    input_ids[:, : 2 * pairs : 2] = keys
    input_ids[:, 1 : 2 * pairs : 2] = values
    input_ids.scatter_(1, positions, keys)
    labels = torch.full_like(input_ids, IGNORED).scatter_(1, positions, values)
    return Batch(input_ids=input_ids, labels=labels)


def gap_weights(places: int, power_a: float) -> torch.Tensor:
    """The chance of each of `places` places to be drawn first, the nearest one first: (places,)."""
    weights = torch.arange(1, places + 1, dtype=torch.float64, device="cpu") ** (power_a - 1)
    return weights / weights.sum()


def _gaps(
    generator: torch.Generator, batch_size: int, length: int, pairs: int, power_a: float
) -> torch.Tensor:
    """A place for the query of each pair, counted from 0: (batch_size, pairs)."""
    weights = gap_weights((length - 2 * pairs) // 2, power_a)
    shape = (batch_size, len(weights))
    # Exponential waits with these rates end in the order of weighted draws without replacement.
    waits = torch.empty(shape, dtype=torch.float64, device="cpu")
    waits = waits.exponential_(generator=generator) / weights
    return waits.argsort(dim=1)[:, :pairs]


def query_distances(batch: Batch) -> torch.Tensor:
    """Tokens from the key of a pair to its query, for each query in reading order: (queries,)."""
    rows, positions = (batch.labels != IGNORED).nonzero(as_tuple=True)
    keys = batch.input_ids[rows, positions]
    first = (batch.input_ids[rows] == keys[:, None]).int().argmax(dim=1)
    return positions - first
