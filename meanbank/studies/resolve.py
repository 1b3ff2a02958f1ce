"""A study with everything filled in: each arm's run, its seeds, and what was matched."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from meanbank.core.bundled import read_yaml
from meanbank.core.config import build, to_plain
from meanbank.core.files import write_text
from meanbank.evaluation.base import Evaluation
from meanbank.studies.spec import (
    ArmSpec,
    ExistingModel,
    GroupSpec,
    MatchSpec,
    NotTestable,
    StudySpec,
    find_study,
    read_spec,
)
from meanbank.studies.verdicts import ClaimSpec
from meanbank.training.config import RunConfig, load_config, load_settings
from meanbank.training.matching import Proposal, memory_proposal, proposals

STUDY = "study.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """What was changed in an arm to match another one, and how near it came.

    ours, theirs: tokens, FLOPs, parameters or bytes of both; context: tokens of those bytes.
    """

    by: str
    to: str
    context: int | None = None
    setting: str
    overrides: tuple[str, ...]
    ours: float
    theirs: float
    difference_percent: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """Runs that differ in their seeds alone, or a model that exists already.

    config_name, overrides: what `config` was made from, with what was `matched`; its seed stands
    for none of `seeds`, which are judged. A model has one seed, which changes nothing.
    """

    label: str
    config_name: str
    overrides: tuple[str, ...] = ()
    matched: Matched | None = None
    seeds: tuple[int, ...]
    evaluations: tuple[Evaluation, ...] = ()
    config: RunConfig | ExistingModel

    @property
    def is_trained_here(self) -> bool:
        return isinstance(self.config, RunConfig)

    def seeded(self, seed: int) -> RunConfig | ExistingModel:
        """The run with that seed; a model as it is."""
        if isinstance(self.config, ExistingModel):
            return self.config
        training = dataclasses.replace(self.config.training, seed=seed)
        return dataclasses.replace(self.config, training=training)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Arms by name. reference: the arm, of any group, that they are held against, or the first."""

    label: str
    reference: str | None = None
    match: MatchSpec | None = None
    arms: dict[str, Arm]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A study, complete. name: that of its file."""

    name: str
    title: str
    description: str = ""
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = ()
    groups: dict[str, Group]
    claims: tuple[ClaimSpec, ...] = ()
    not_testable: tuple[NotTestable, ...] = ()

    @property
    def arms(self) -> dict[str, Arm]:
        """All arms by name."""
        return {name: arm for group in self.groups.values() for name, arm in group.arms.items()}


def load_study(name: str | Path, overrides: Sequence[str] = ()) -> Study:
    """The study of a file, or of a bundled one by name, with everything in it checked.

    overrides: settings that are other than in the file, groups.GROUP.arms.ARM.model.name=FOLDER.
    Raises ValueError, in one line, for whatever is wrong: also a configuration, a setting or a
    match that cannot be met. Whether a model that exists is there is looked at when it is run.
    """
    path = find_study(name)
    spec = read_spec(path, overrides)
    groups = {}
    for group_name, group in spec.groups.items():
        try:
            groups[group_name] = _resolve_group(group_name, group, spec, path.parent)
        except ValueError as error:
            raise ValueError(f"{path}: groups.{group_name}.{error}") from None
    return Study(
        name=path.stem,
        title=spec.title,
        description=spec.description,
        seeds=spec.seeds,
        tuning_seeds=spec.tuning_seeds,
        groups=groups,
        claims=spec.claims,
        not_testable=spec.not_testable,
    )


def _resolve_group(name: str, group: GroupSpec, spec: StudySpec, folder: Path) -> Group:
    arms = {arm: _resolve_arm(arm, group.arm(arm), spec.seeds, folder) for arm in group.arms}
    if group.match is not None:
        reference = arms[group.match.to].config
        assert isinstance(reference, RunConfig)  # the specification has no others in a match
        for arm in group.arms:
            if arm != group.match.to:
                arms[arm] = _matched(arm, arms[arm], group.match, reference)
    return Group(
        label=group.label or name,
        reference=group.reference,
        match=group.match,
        arms=arms,
    )


def _resolve_arm(name: str, arm: ArmSpec, seeds: Sequence[int], folder: Path) -> Arm:
    if arm.model is not None:
        return _existing_arm(name, arm, seeds[0], folder)
    if arm.config is None:
        raise ValueError(f"arms.{name}: it has no config, and neither has its group")
    beside = folder / arm.config
    config_name = str(beside) if beside.is_file() else arm.config
    try:
        config = load_config(config_name, arm.overrides)
    except ValueError as error:
        raise ValueError(f"arms.{name}: {error}") from None
    return Arm(
        label=arm.label or config.description or name,
        config_name=config_name,
        overrides=arm.overrides,
        seeds=tuple(seeds) if arm.seeds is None else arm.seeds,
        evaluations=arm.evaluations,
        config=config,
    )


def _existing_arm(name: str, arm: ArmSpec, seed: int, folder: Path) -> Arm:
    model = ExistingModel(name=arm.model) if isinstance(arm.model, str) else arm.model
    assert model is not None
    beside = folder / model.name
    if (beside / "config.json").is_file():
        model = dataclasses.replace(model, name=str(beside))
    return Arm(
        label=arm.label or name,
        config_name=model.name,
        seeds=arm.seeds or (seed,),
        evaluations=arm.evaluations,
        config=model,
    )


def _matched(name: str, arm: Arm, match: MatchSpec, reference: RunConfig) -> Arm:
    """The arm with the settings that match it to `reference`."""
    try:
        found = _proposal(arm, match, reference)
    except ValueError as error:
        told = f"arms.{name}: it cannot be matched to {match.to} by {match.by}: {error}"
        raise ValueError(told) from None
    if abs(found.difference_percent) > match.tolerance:
        raise ValueError(
            f"arms.{name}: it cannot be matched to {match.to} by {match.by} within "
            f"{match.tolerance:g} %: the nearest is {' '.join(found.overrides)}, "
            f"{found.ours:,.0f} instead of {found.theirs:,.0f} ({found.difference_percent:+.2f} %)"
        )
    overrides = (*arm.overrides, *found.overrides)
    return dataclasses.replace(
        arm,
        config=load_config(arm.config_name, overrides),
        overrides=overrides,
        matched=Matched(
            by=match.by, to=match.to, context=match.context, **dataclasses.asdict(found)
        ),
    )


def _proposal(arm: Arm, match: MatchSpec, reference: RunConfig) -> Proposal:
    def load(more: Sequence[str]) -> RunConfig:
        return load_config(arm.config_name, [*arm.overrides, *more])

    if match.by == "bytes":
        assert match.context is not None
        settings = load_settings(arm.config_name, arm.overrides)
        return memory_proposal(load, settings, reference, match.context)
    found = proposals(load, reference, match.by)
    return min(found, key=lambda proposal: abs(proposal.difference_percent))


def write_study(folder: Path, study: Study) -> None:
    """Write the study into its folder, where `read_study` finds it."""
    text = yaml.safe_dump(to_plain(study), sort_keys=False, allow_unicode=True)
    write_text(folder / STUDY, text)


def read_study(folder: Path) -> Study:
    """The study that a folder is of; ValueError, in one line, where it is of none."""
    path = folder / STUDY
    if not path.is_file():
        raise ValueError(
            f"{folder} is not the folder of a study (it has no {STUDY}); "
            f"`meanbank study run FILE --out {folder}` makes one"
        )
    settings: Any = read_yaml("study", path)
    try:
        return build(Study, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
