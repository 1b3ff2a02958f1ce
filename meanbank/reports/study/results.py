"""What a study leaves behind, as data. None, or an empty collection, stands for what is missing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of training metrics; `tokens` and `seconds` are from the start of training on."""

    step: int
    loss: float | None = None
    held_out: float | None = None
    tokens: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation file."""

    title: str
    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    produced_by: Mapping[str, Any] = field(default_factory=dict)
    bos_policy: str | None = None
    prompt_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One arm with one seed, and what was measured on it; `run` is its `run.json`.

    model: of one that was not trained here, where it is from and what tells it from others.
    """

    seed: int
    overrides: Any = None
    matched: Any = None
    parameters: int | None = None
    tokens: int | None = None
    flops: float | None = None
    training_seconds: float | None = None
    evaluation_seconds: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    produced_by: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One kind of model with a job a seed, in order of seeds; tuning jobs apart.

    config: the configuration's name, or the model's where the arm is one that existed before
    (is_trained_here is false). seeds: those that it was to have jobs of.
    """

    name: str
    label: str
    config: str = ""
    is_trained_here: bool = True
    seeds: tuple[int, ...] = ()
    jobs: tuple[Job, ...] = ()
    tuning: tuple[Job, ...] = ()

    def evaluations(self, title: str) -> list[tuple[int, Evaluation]]:
        """(seed, evaluation) of every seed that was evaluated so."""
        return [(job.seed, job.evaluations[title]) for job in self.jobs if title in job.evaluations]

    def values(self, score: str) -> dict[int, float]:
        """A score by seed."""
        return {job.seed: job.scores[score] for job in self.jobs if score in job.scores}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against another on the items that both have; low and high: of the mean difference.

    An item's difference is a mean over the seeds that both have; above zero, the arm has more.
    """

    arm: str
    against: str
    score: str
    items: int
    wins: int
    ties: int
    losses: int
    mean: float
    low: float
    high: float
    p_holm: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arms that are compared. reference: what they are held against, an arm of any group."""

    name: str
    label: str
    arms: tuple[Arm, ...]
    reference: Arm | None = None
    match: Any = None
    comparisons: tuple[Comparison, ...] = ()

    def titles(self, task: str) -> list[str]:
        """Titles of the evaluations of a task that any arm has, in order of first appearance."""
        found = (
            evaluation
            for arm in self.arms
            for job in arm.jobs
            for evaluation in job.evaluations.values()
        )
        return list(dict.fromkeys(one.title for one in found if one.task == task))

    @property
    def with_reference(self) -> tuple[Arm, ...]:
        """The arms, after what they are held against where that is of another group."""
        elsewhere = self.reference is not None and self.reference not in self.arms
        return (self.reference, *self.arms) if elsewhere and self.reference else self.arms

    @property
    def labels(self) -> dict[str, str]:
        """Labels of arms by name."""
        return {arm.name: arm.label for arm in self.with_reference}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim and what became of it; `interval` and `bootstrap` are (low, high).

    outcome: the verdict in an overview's words, see `meanbank.studies.outcomes`. each: about each
    seed, not their mean.
    """

    name: str
    says: str
    source: str
    verdict: str
    outcome: str
    each: bool
    expected: str
    mean: float | None
    interval: tuple[float, float] | None
    interval_kind: str
    bootstrap: tuple[float, float] | None
    p: float | None
    p_holm: float | None
    threshold: float | None
    direction: str
    values: Mapping[str, float]
    tuning_values: Mapping[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NotTestable:
    """A published claim that the study cannot test, and why."""

    says: str
    source: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A job without results: it failed, for this reason, or was not run (no reason)."""

    group: str
    arm: str
    seed: int
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Study:
    """All that was found in the folder of a study."""

    name: str
    title: str
    description: str
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    groups: tuple[Group, ...]
    claims: tuple[Claim, ...]
    not_testable: tuple[NotTestable, ...]
    rule: str
    outcomes: Mapping[str, str]
    absent: tuple[Absent, ...]

    @property
    def has_seeds(self) -> bool:
        """Whether anything is trained here: models that existed before have no seeds."""
        return any(arm.is_trained_here for group in self.groups for arm in group.arms)

    @property
    def jobs(self) -> list[Job]:
        """Every finished job that counts, of all groups."""
        return [job for group in self.groups for arm in group.arms for job in arm.jobs]
