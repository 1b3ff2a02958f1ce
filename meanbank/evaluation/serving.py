"""Speed of reading and going on, and bytes held, by context."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from meanbank.core.config import check_least
from meanbank.core.progress import Report, progress
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, check_seed
from meanbank.evaluation.losses import check_positions
from meanbank.model import MeanbankCache

PREFILL_CHUNK = 2048
WARM_UP = 8  # steps before the timed ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving(Evaluation, tag="serving"):
    """Tokens a second of batch 1, of any causal language model, and the bytes that its cache holds.

    contexts: random tokens that are read first, 2,048 at a time. tokens: decoded after them, one by
    one; memory updates are in their mean (let it be a multiple of the chunk), the median step has
    none. 2,048 tokens and 8 more steps go before.
    """

    contexts: tuple[int, ...] = (8192,)
    tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "contexts", "tokens")
        check_seed(self.seed)

    @property
    def alone(self) -> bool:
        return True

    def samples(self, subject: Subject) -> list[Sample]:
        return [
            Sample(id=str(context), content=context, size=context + WARM_UP + self.tokens)
            for context in self.contexts
        ]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        return [self._serve(subject, sample.content) for sample in samples]

    @torch.inference_mode()
    def _serve(self, subject: Subject, context: int) -> Record:
        model: Any = subject.model
        steps = WARM_UP + self.tokens
        ids = random_tokens(model, context + steps, self.seed)
        check_positions(model, context + steps)
        times = []
        read(model, ids[:, : min(context, PREFILL_CHUNK)])
        with progress(self.title, context + steps) as report:
            cache, prefill = read(model, ids[:, :context], report)
            for index in range(context, context + steps):
                began = time.perf_counter()
                output = model(input_ids=ids[:, index : index + 1], cache=cache, use_cache=True)
                cache = output.cache
                output.logits[0, -1].argmax().item()
                times.append(time.perf_counter() - began)
                report(1)
        timed = times[WARM_UP:]
        return {
            "tokens": context,
            "prefill_tokens_per_second": context / prefill,
            "decode_tokens_per_second": self.tokens / sum(timed),
            "median_milliseconds_per_token": 1e3 * statistics.median(timed),
            "bytes": held_bytes(cache),
        }

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        return {"contexts": list(records), "decoded": self.tokens}

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        found = {}
        for row in results["contexts"]:
            found[f"{self.title}:prefill@{row['tokens']}"] = row["prefill_tokens_per_second"]
            found[f"{self.title}:decode@{row['tokens']}"] = row["decode_tokens_per_second"]
            found[f"{self.title}:bytes@{row['tokens']}"] = row["bytes"]
        return found


@torch.inference_mode()
def cost_at(model: PreTrainedModel, length: int) -> dict[str, Any]:
    """Bytes that a cache holds after so many random tokens, and tokens a second of reading them."""
    cache, seconds = read(model, random_tokens(model, length, seed=0))
    return {
        "tokens": length,
        "bytes": held_bytes(cache),
        "prefill_tokens_per_second": length / seconds,
    }


def random_tokens(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    """(1, count) on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, count), generator=generator, device="cpu")
    return ids.to(model.device)


def read(
    model: Any, ids: Tensor, report: Report = lambda amount, note="": None
) -> tuple[Any, float]:
    """The cache after ids (1, T), read 2,048 at a time, and the seconds that took.

    ValueError where they are more than the model has positions for.
    """
    check_positions(model, ids.shape[1])
    cache, began = None, time.perf_counter()
    for part in ids.split(PREFILL_CHUNK, dim=1):
        output = model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        output.logits[0, -1].argmax().item()  # waits for the device
        report(part.shape[1])
    return cache, time.perf_counter() - began


def held_bytes(cache: Cache) -> int:
    """Bytes of a cache: its states, or the tensors that another model's layers keep."""
    if isinstance(cache, MeanbankCache):
        return cache.nbytes()
    held = (value for layer in cache.layers for value in vars(layer).values())
    return sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))
