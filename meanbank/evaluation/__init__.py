"""Evaluations: what a model is measured by, each a small file of settings, samples and scores."""

from meanbank.evaluation.base import Evaluation, Record, Sample, Subject
from meanbank.evaluation.bigram import BigramBits
from meanbank.evaluation.bpb import BitsPerByte
from meanbank.evaluation.changed import Changed
from meanbank.evaluation.core_tasks import Core
from meanbank.evaluation.driver import Outcome, run_evaluation
from meanbank.evaluation.harness_tasks import Harness
from meanbank.evaluation.memory import MemoryBytes
from meanbank.evaluation.memory_statistics import MemoryStatistics
from meanbank.evaluation.mqar import Mqar
from meanbank.evaluation.parts import Parts
from meanbank.evaluation.position_loss import PositionLoss
from meanbank.evaluation.position_probe import PositionProbe
from meanbank.evaluation.recall import Recall
from meanbank.evaluation.ruler import Ruler
from meanbank.evaluation.serving import Serving
from meanbank.evaluation.text_sample import TextSample

__all__ = [
    "BigramBits",
    "BitsPerByte",
    "Changed",
    "Core",
    "Evaluation",
    "Harness",
    "MemoryBytes",
    "MemoryStatistics",
    "Mqar",
    "Outcome",
    "Parts",
    "PositionLoss",
    "PositionProbe",
    "Recall",
    "Record",
    "Ruler",
    "Sample",
    "Serving",
    "Subject",
    "TextSample",
    "run_evaluation",
]
