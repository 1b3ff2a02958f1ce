"""A study file as data: groups of arms, how each is trained and evaluated, and what is claimed.

What it leaves open, `meanbank.studies.resolve` fills in.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import meanbank.evaluation  # noqa: F401 - registers what can be evaluated
from meanbank.core.bundled import bundled, find_yaml, read_yaml
from meanbank.core.config import apply_override, build, check_least, choose
from meanbank.data.sources import RECALL, check_spec
from meanbank.evaluation.base import Evaluation
from meanbank.studies.verdicts import ClaimSpec

By = Literal["tokens", "flops", "params", "bytes"]
Bos = Literal["none", "always"]
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchSpec:
    """What the arms of a group have in common with one of them.

    by: training "tokens" or "flops" (the steps are set), "params" (the hidden_size or the depth),
    or "bytes" remembered of one sequence of `context` tokens (the size of its memories). to: the
    arm that stays as it is. tolerance: by how many percent an arm may miss it.
    """

    by: By
    to: str
    context: int | None = None
    tolerance: float = 2.0

    def __post_init__(self) -> None:
        if (self.by == "bytes") != (self.context is not None):
            raise ValueError("context, in tokens, is for by: bytes, which needs it")
        check_least(self, 1, "context")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, in percent, got {self.tolerance}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExistingModel:
    """A causal language model that is evaluated as it is.

    name: a Hugging Face folder, beside the study or from the current folder on, or hf:NAME of the
    hub. data: a source of texts, as data.source, whose held-out documents are read. bos: "always"
    puts its begin-of-text token before every text.
    """

    name: str
    data: str | None = None
    bos: Bos = "none"

    def __post_init__(self) -> None:
        if self.data is not None:
            check_spec(self.data)
            if self.data == RECALL:
                raise ValueError("data must be texts: the source 'recall' has none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """An arm; what it leaves out is its group's. Overrides and evaluations follow the group's.

    config: a configuration of `meanbank train`, by name or path. model: in its place a model that
    exists: nothing is trained, so the group's overrides are not for it, and it has one seed, which
    only names its results. label: in tables, default the configuration's description or the arm.
    """

    config: str | None = None
    model: ExistingModel | str | None = None
    label: str | None = None
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    evaluations: tuple[Evaluation, ...] = ()

    def __post_init__(self) -> None:
        check_seeds("seeds", self.seeds)
        check_evaluations(self.evaluations)
        if self.model is not None:
            if self.config is not None or self.overrides:
                raise ValueError("a model is evaluated as it is: leave config and overrides out")
            if self.seeds is not None and len(self.seeds) > 1:
                raise ValueError(f"a model that exists has one seed, got {list(self.seeds)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Arms that are compared with each other. An arm may be the name of a configuration alone.

    reference: what the report holds the arms against, an arm of any group; default the first one.
    """

    arms: dict[str, ArmSpec | str]
    label: str | None = None
    reference: str | None = None
    config: str | None = None
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    match: MatchSpec | None = None
    evaluations: tuple[Evaluation, ...] = ()

    def __post_init__(self) -> None:
        check_names("arm", self.arms)
        check_seeds("seeds", self.seeds)
        check_evaluations(self.evaluations)
        if self.match is not None:
            choose("arm in match.to:", self.match.to, self.arms)
            for name in self.arms:
                if self.arm(name).model is not None:
                    raise ValueError(f"arm {name!r} is a model that exists: it cannot be matched")

    def arm(self, name: str) -> ArmSpec:
        """The arm of that name, complete but for seeds that the study gives."""
        arm = self.arms[name]
        arm = ArmSpec(config=arm) if isinstance(arm, str) else arm
        evaluations = (*self.evaluations, *arm.evaluations)
        seeds = self.seeds if arm.seeds is None else arm.seeds
        if arm.model is not None:
            seeds = None if seeds is None else seeds[:1]
            return dataclasses.replace(arm, seeds=seeds, evaluations=evaluations)
        return dataclasses.replace(
            arm,
            config=arm.config or self.config,
            overrides=(*self.overrides, *arm.overrides),
            seeds=seeds,
            evaluations=evaluations,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotTestable:
    """A published claim that a study cannot test.

    says: the claim in words. source: where it is from. why: what testing it would take.
    """

    says: str
    source: str
    why: str

    def __post_init__(self) -> None:
        for name, text in dataclasses.asdict(self).items():
            if not text.strip():
                raise ValueError(f"{name} is empty; say it in a sentence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySpec:
    """A study as its file has it.

    seeds: of the runs that claims are judged on. tuning_seeds: those that settings were chosen on;
    they are run, too, and marked. not_testable: what its report lists besides its claims.
    """

    title: str
    groups: dict[str, GroupSpec]
    description: str = ""
    seeds: tuple[int, ...] = (0,)
    tuning_seeds: tuple[int, ...] = ()
    claims: tuple[ClaimSpec, ...] = ()
    not_testable: tuple[NotTestable, ...] = ()

    def __post_init__(self) -> None:
        check_names("group", self.groups)
        check_seeds("seeds", self.seeds)
        if self.tuning_seeds:
            check_seeds("tuning_seeds", self.tuning_seeds)
        arms: dict[str, ArmSpec] = {}
        for group in self.groups.values():
            for name in group.arms:
                if name in arms:
                    raise ValueError(f"there are two arms {name!r}; names are unique in a study")
                arms[name] = group.arm(name)
                check_evaluations(arms[name].evaluations)  # the group's and its own together
                check_apart(name, arms[name].seeds or self.seeds, self.tuning_seeds)
        check_names("arm", arms)  # of different groups, too
        for name, group in self.groups.items():
            if group.reference is not None:
                choose(f"arm in groups.{name}.reference:", group.reference, arms)
        for number, claim in enumerate(self.claims):
            for score, name in claim.parsed.terms:
                choose(f"arm in claims.{number}:", name, arms)
                check_score(f"claims.{number}: {score}({name})", score, arms[name].evaluations)


def check_names(kind: str, names: Iterable[str]) -> None:
    """Raise ValueError unless there are names, and all can name a folder."""
    names = list(names)
    if not names:
        raise ValueError(f"there is no {kind}")
    folded = [re.sub(r"\W+", "-", name.casefold()) for name in names]
    for name, other in zip(names, folded, strict=True):
        if folded.count(other) > 1:
            raise ValueError(
                f"the name of the {kind} {name!r} differs from another's only in upper and lower "
                "case or in '-' and '.', which files of some systems do not tell apart"
            )
    for name in names:
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"the name of the {kind} {name!r} must be of letters, digits, '_', '-' and '.', "
                "and begin with none of the last two"
            )


def check_seeds(what: str, seeds: Sequence[int] | None) -> None:
    """Raise ValueError unless the seeds, where any are given, are distinct and not negative."""
    if seeds is None:
        return
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds) or max(seeds) >= 2**63:
        raise ValueError(f"{what} must be distinct numbers from 0 to 2^63 - 1, got {list(seeds)}")


def check_apart(arm: str, seeds: Sequence[int], tuning: Sequence[int]) -> None:
    """Raise ValueError where a seed would be judged that settings were chosen on."""
    both = sorted(set(seeds) & set(tuning))
    if both:
        raise ValueError(f"seed {both[0]} of arm {arm!r} is among the tuning_seeds, too")


def check_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Raise ValueError unless each has a title of its own that can name a file."""
    titles = [evaluation.title for evaluation in evaluations]
    for title in titles:
        if not re.fullmatch(NAME, title):
            raise ValueError(f"an evaluation cannot be named {title!r}; use letters, digits, _ - .")
        if titles.count(title) > 1:
            raise ValueError(f"there are two evaluations {title!r}; give one a name of its own")


def check_score(where: str, score: str, evaluations: Sequence[Evaluation]) -> None:
    """Raise ValueError where no evaluation gives a score of that name: see `Evaluation.scores`."""
    titles = [evaluation.title for evaluation in evaluations]
    if not any(score.startswith(title) and score[len(title) :][:1] in "@:." for title in titles):
        raise ValueError(
            f"{where} is given by no evaluation of that arm; it has {', '.join(titles) or 'none'}"
        )


def find_study(name: str | Path) -> Path:
    """A path to a study file, or a bundled one's name."""
    return find_yaml("study", name, bundled("studies"))


def read_spec(path: Path, overrides: Sequence[str] = ()) -> StudySpec:
    """The study file at `path`; ValueError, in one line, for anything wrong in it alone.

    overrides: settings `KEY=VALUE` that are other than in the file.
    """
    settings = read_yaml("study", path)
    try:
        for override in overrides if isinstance(settings, dict) else ():
            apply_override(settings, override)
        return build(StudySpec, settings)
    except ValueError as error:
        place = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ValueError(f"{place}{error}") from None
