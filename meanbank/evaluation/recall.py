"""Associative recall: accuracy by length and number of pairs."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from meanbank.core.progress import progress
from meanbank.data import IGNORED, RecallConfig, recall_batch

GRID = ((128, 12), (512, 12), (1024, 12), (128, 24), (512, 48))


@torch.inference_mode()
def recall_accuracy(
    model: PreTrainedModel,
    config: RecallConfig,
    *,
    grid: Iterable[tuple[int, int]] = GRID,
    sequences: int = 256,
    batch_size: int = 32,
    seed: int = 1_000_000,
) -> dict[str, Any]:
    """Share of queries whose value gets the highest logit, for each (length, pairs) of `grid`.

    Sequences depend on `seed` and the setting only, so that models see the same ones; the default
    seed is far from those of training.
    """
    model.eval()
    settings = list(grid)
    results = []
    with progress("recall", len(settings) * sequences) as report:
        for length, pairs in settings:
            generator = torch.Generator().manual_seed(seed + 10_000 * pairs + length)
            right = asked = 0
            for first in range(0, sequences, batch_size):
                size = min(batch_size, sequences - first)
                batch = recall_batch(generator, size, length, pairs, config).to(model.device)
                logits = model(input_ids=batch.input_ids, use_cache=False).logits
                counted = batch.labels != IGNORED
                right += int((logits.argmax(-1) == batch.labels)[counted].sum())
                asked += int(counted.sum())
                report(size)
            accuracy = right / asked
            results.append(
                {"length": length, "pairs": pairs, "accuracy": accuracy, "queries": asked}
            )
    return {"grid": results, "chance": 1 / config.values, "sequences": sequences}
