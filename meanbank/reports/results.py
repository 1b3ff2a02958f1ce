"""What a demo leaves behind, as data. None, or an empty collection, stands for what is missing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Arms in the order of every table and legend, with the names for arms that did not say theirs.
LANGUAGE_ARMS = {
    "full": "Full attention",
    "block_window": "Block window",
    "kvm_fixed": "KVM, fixed rows",
    "kvm_sqrt": "KVM, sqrt(N) rows",
    "kvm_sqrt_bank": "KVM, sqrt(N) rows + bank",
}
RECALL_ARMS = {name: LANGUAGE_ARMS[name] for name in ("full", "kvm_fixed", "kvm_sqrt")}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Training of one run: `losses` (step, nats a token), `held_out` (step, bits per byte)."""

    losses: tuple[tuple[int, float], ...] = ()
    held_out: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trained model: its `run.json` and its training curve.

    `produced_by`: version, commit, Python, device and so on, as the run stated them.
    """

    description: str | None = None
    parameters: int | None = None
    seed: int | None = None
    sequence_length: int | None = None
    steps: int | None = None
    tokens: int | None = None
    data: Any = None
    produced_by: Mapping[str, Any] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation file: its task, its settings, who made it and its results, unread."""

    task: str
    settings: Mapping[str, Any]
    produced_by: Mapping[str, Any]
    results: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Mean loss, in nats a token, over the token positions from `start` to before `stop`."""

    start: int
    stop: int
    loss: float
    standard_error: float | None


@dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """Loss by token position; `at` k: over the positions from kT/2 to kT, training length T."""

    training_length: int | None
    documents: int | None
    buckets: tuple[Bucket, ...]
    at: Mapping[int, Bucket]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of state of one sequence, by the number of tokens that it has read."""

    bytes_at: Mapping[int, int]
    table_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DecodeSpeed:
    """Speed of generation with `context` tokens already read."""

    context: int | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class LanguageArm:
    """One language model and what was measured on it; `label` is its readable name."""

    name: str
    label: str
    run: Run | None = None
    bits_per_byte: float | None = None
    position_loss: PositionLoss | None = None
    memory: MemoryUse | None = None
    decode_speed: DecodeSpeed | None = None
    evaluations: tuple[Evaluation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecallRun:
    """One seed of a recall model; `accuracy` by (length in tokens, pairs)."""

    seed: int
    run: Run | None = None
    accuracy: Mapping[tuple[int, int], float] = field(default_factory=dict)
    queries: Mapping[tuple[int, int], int] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecallArm:
    """One kind of recall model with all its seeds, in order."""

    name: str
    label: str
    runs: tuple[RecallRun, ...] = ()

    def mean(self, setting: tuple[int, int]) -> float | None:
        """Mean accuracy over the seeds that were measured at (length, pairs)."""
        values = [run.accuracy[setting] for run in self.runs if setting in run.accuracy]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Bigram:
    """The baseline that predicts each token from the one before it."""

    bits_per_byte: float | None
    training_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that one model generated after a prompt."""

    arm: str
    prompt: str
    text: str
    tokens_per_second: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class DemoResults:
    """All that was found under `folder`; every known arm is listed, measured or not."""

    folder: Path
    language: tuple[LanguageArm, ...]
    recall: tuple[RecallArm, ...]
    bigram: Bigram | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def recall_settings(self) -> list[tuple[int, int]]:
        """Every measured (length, pairs), by pairs first: each length trend stands together."""
        found = {setting for arm in self.recall for run in arm.runs for setting in run.accuracy}
        return sorted(found, key=lambda setting: (setting[1], setting[0]))

    @property
    def recall_seeds(self) -> list[int]:
        """Every seed of a recall model."""
        return sorted({run.seed for arm in self.recall for run in arm.runs})
