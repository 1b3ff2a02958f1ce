"""Bits per byte of held-out text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meanbank.evaluation.base import Record, Sample, Subject
from meanbank.evaluation.windows import Windows, summed


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitsPerByte(Windows, tag="bpb"):
    """Bits per byte of held-out text; targets that stand for no bytes (end of text) are left out.

    The first token of a document counts, as for any model; training on text leaves it out, since
    nothing in the past tells what comes, so many short documents cost a model of ours something.
    Settings as of `Windows`.
    """

    def samples(self, subject: Subject) -> list[Sample]:
        return [Sample(id=str(start), content=start) for start in self.starts(subject)]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        return self.losses(subject, [sample.content for sample in samples])

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        return summed(records)

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        return {self.title: results["bpb"]}
