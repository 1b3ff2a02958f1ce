"""Associative recall: accuracy by length and number of pairs."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from meanbank.data import IGNORED, Batch, Filler, recall_batch
from meanbank.data.recall import check_room
from meanbank.evaluation.base import Record, Sample, Subject, mean_scores, prompt_hash
from meanbank.evaluation.pair_grid import PairGrid, Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(PairGrid, tag="recall"):
    """Accuracy on the task that the subject was trained on, at lengths and pairs of `grid`.

    filler: what stands between the pairs, see `meanbank.data.Stage`. The default seed is far from
    those of training. Other settings as of `PairGrid`.
    """

    grid: tuple[Setting, ...] = ((128, 12), (512, 12), (1024, 12), (128, 24), (512, 48))
    filler: Filler = "diverse"
    seed: int = 1_000_000

    def samples(self, subject: Subject) -> list[Sample]:
        for length, pairs in self.grid:
            check_room(length, pairs, self.vocabulary(subject))
        return super().samples(subject)

    @torch.inference_mode()
    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        made = [self._sequence(subject, *sample.content) for sample in samples]
        input_ids = torch.cat([batch.input_ids for batch in made])
        labels = torch.cat([batch.labels for batch in made])
        logits = subject.model(input_ids=input_ids.to(subject.model.device), use_cache=False).logits
        asked = labels != IGNORED
        right = (logits.argmax(-1).cpu() == labels) & asked
        return [
            {
                "prompt": prompt_hash(row),
                "right": int(found.sum()),
                "asked": int(wanted.sum()),
                "scores": {self.score(*sample.content[:2]): (found.sum() / wanted.sum()).item()},
            }
            for row, found, wanted, sample in zip(input_ids, right, asked, samples, strict=True)
        ]

    def _sequence(self, subject: Subject, length: int, pairs: int, number: int) -> Batch:
        generator = self.generator(length, pairs, number)
        return recall_batch(generator, 1, length, pairs, self.vocabulary(subject), self.filler)

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        means, asked = mean_scores(records), Counter[str]()
        for record in records:
            asked.update(dict.fromkeys(record["scores"], record["asked"]))
        rows = [
            {"length": length, "pairs": pairs, "accuracy": means[score], "queries": asked[score]}
            for length, pairs in self.grid
            for score in [self.score(length, pairs)]
        ]
        chance = 1 / self.vocabulary(subject).values
        return {"grid": rows, "chance": chance, "sequences": self.sequences, "filler": self.filler}
