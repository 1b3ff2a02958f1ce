"""How a model uses its memories while it is trained, on one held-out document."""

import functools
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from meanbank.core.files import told
from meanbank.evaluation import MemoryStatistics, Subject
from meanbank.evaluation.memory_statistics import layer_statistics, learned, memories_of
from meanbank.evaluation.parts import RootMeanSquares
from meanbank.model import MeanbankForCausalLM
from meanbank.training.metrics import cut_back
from meanbank.training.parallel import OneProcess


class StatisticsLog:
    """Appends to `statistics.jsonl`: a JSON line with the `step`, the `tokens` read and `layers`.

    A layer has its number; where it compresses, `memory` and what `layer_statistics` tells; and
    what it has learned: `temperatures` by query head, `coefficients` of its values by part, and
    `products`, coefficient x root mean square, of the parts that are tables. Training is not
    touched: no random number is drawn. Every rank measures, for weights may be divided, and the one
    that has begun a file writes.
    """

    def __init__(self, subject: Subject, parallel: OneProcess) -> None:
        self.subject, self._parallel = subject, parallel
        self.path: Path | None = None

    def begin(self, path: Path, first_step: int) -> None:
        """Write here; an earlier try's lines after `first_step` steps are dropped."""
        self.path = path
        cut_back(path, first_step)

    def write(self, step: int) -> None:
        """Measure the model after a step, and have the line on disk."""
        model: Any = self.subject.model
        with self._parallel.whole():
            layers = model_statistics(model, self.tokens)
        if self.path is None:
            return
        line = {"step": step, "tokens": len(self.tokens), "layers": layers}
        with told(self.path), self.path.open("ab") as file:
            file.write(json.dumps(line).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @functools.cached_property
    def tokens(self) -> Tensor:
        """The same for all steps: (T,), of at most a training sequence.

        They begin the first held-out document that is so long, or the longest; for recall, they are
        the first sequence that `memory-statistics` reads.
        """
        task, number = MemoryStatistics(count=1), 0
        if self.subject.recall is None:
            held_out = self.subject.corpus.held_out
            enough = held_out.documents_at_least(task.length(self.subject))
            number = int(enough[0] if len(enough) else held_out.lengths.argmax())
        return task.tokens(self.subject, number)


def model_statistics(model: MeanbankForCausalLM, tokens: Tensor) -> list[dict[str, Any]]:
    """What `StatisticsLog` tells of layers, without those that have nothing to tell."""
    training, rms, found = model.training, RootMeanSquares(), []
    measured = {}
    if memories_of(model):
        try:
            told_of = layer_statistics(model.eval(), tokens)
        finally:
            model.train(training)
        measured = {layer["layer"]: layer for layer in told_of}
    for number, block in enumerate(model.model.layers):
        attention: Any = block.attention
        parts = attention.values.parts(model.model.shared_table)
        products = {
            part.name: part.coefficient * rms(part.table)
            for part in parts
            if part.coefficient is not None and part.table is not None
        }
        layer = measured.get(number, {}) | learned(model, number) | {"products": products}
        layer = {name: value for name, value in layer.items() if value != {}}
        if layer:
            found.append({"layer": number} | layer)
    return found
