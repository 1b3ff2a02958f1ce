"""Claims and the scores of runs to verdicts."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meanbank.studies.claims import LARGEST, Claim, Term, parse_claim
from meanbank.studies.statistics import (
    FEW_SEEDS,
    Interval,
    Items,
    SeedTest,
    bootstrap,
    holm,
    over_seeds,
)

HOLDS, DOES_NOT_HOLD, UNDECIDED = "holds", "does not hold", "undecided"
NOT_MEASURED, NOT_TESTABLE = "not measured", "not testable"
SUGGESTIVE = "suggestive: "

FEWEST_SEEDS = 3
LEVEL = 0.05

RULE = (
    "A claim is about the mean over seeds, of differences within a seed where it compares arms. It "
    "holds when its one-sided p value of a t test, adjusted over the claims of the study after "
    "Holm, is below .05 and the whole 95 % t interval satisfies it; it does not hold when nothing "
    "of that interval does; otherwise it is undecided. Where every score is a mean over items, "
    "the bootstrap interval has to say the same. Where all seeds have one value, a sign test "
    "takes the place of the t test. A claim about each seed holds when every seed satisfies it "
    "and does not hold when one does not. With fewer than 6 seeds a verdict is at best "
    "suggestive; with fewer than 3 a claim is undecided. Seeds that settings were tuned on do not "
    "count. A claim with a value missing in a seed of one of its arms is not measured."
)
RULE_OF_MODELS = (
    "A model that was not trained here has no seeds: beside trained ones it has its one value at "
    "each of their seeds. A claim about such models alone holds when the whole 95 % bootstrap "
    "interval over items satisfies it and does not hold when nothing of it does, unadjusted; it is "
    "undecided otherwise, and where no item differs from another. Without items it is not "
    "testable. A claim about each seed compares the one value, and tells nothing of other items."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimSpec:
    """A claim as a study states it; ValueError where `claim` cannot be read.

    claim: see `meanbank.studies.claims`. says: the same in words. source: where it is from.
    expected: what that source reports. each: every seed by itself satisfies it, not their mean.
    """

    claim: str
    says: str = ""
    source: str = ""
    expected: str | None = None
    each: bool = False

    def __post_init__(self) -> None:
        assert self.parsed.terms

    @functools.cached_property
    def parsed(self) -> Claim:
        return parse_claim(self.claim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunScores:
    """What one run scored; a run that failed is given with the scores that it has.

    tuning: settings were chosen on this seed. existing: the model was not trained here, so its
    scores are the same with every seed, and it is given once. items: {score: {sample id: value}} of
    the scores that are means over items; may be empty.
    """

    arm: str
    seed: int
    tuning: bool = False
    existing: bool = False
    scores: Mapping[str, float]
    items: Mapping[str, Items] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim, what was measured of it, and the verdict after `RULE`.

    verdict: `HOLDS`, `DOES_NOT_HOLD` (each maybe after `SUGGESTIVE`), `UNDECIDED`, `NOT_MEASURED`
    or `NOT_TESTABLE`. direction and threshold: of the sum that the values are of, see `Claim`.
    mean to p_holm: None where the claim is not measured or is about each seed, and where there is
    no such number. values, tuning_values: the sum by seed. satisfied: how many of `values` satisfy
    the claim.
    """

    claim: str
    says: str
    source: str
    expected: str | None
    each: bool
    verdict: str
    direction: str
    threshold: float
    values: Mapping[int, float]
    satisfied: int
    tuning_values: Mapping[int, float]
    mean: float | None = None
    sd: float | None = None
    interval: Interval | None = None
    bootstrap: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that count, in order."""
        return tuple(self.values)

    def plain(self) -> dict[str, Any]:
        """JSON values: all fields and `seeds`; an interval is {low, high, kind}."""
        found = dataclasses.asdict(self)
        for name in ("values", "tuning_values"):
            found[name] = {str(seed): value for seed, value in found[name].items()}
        return {**found, "seeds": list(self.seeds), "notes": list(self.notes)}


def judge(
    claims: Sequence[ClaimSpec],
    runs: Sequence[RunScores],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Verdict]:
    """One verdict a claim, in order, after `RULE` and `RULE_OF_MODELS`.

    The seeds of a claim are those of the runs of its arms: an arm that lacks a seed which another
    arm of the claim has leaves it not measured. A score that is no number, or above 1e50, is as
    good as missing. resamples, seed: of the bootstrap.
    Raises ValueError where two runs have one arm and seed.
    """
    table = _Runs(runs)
    measured = [_measure(spec, table, resamples, seed) for spec in claims]
    adjusted = iter(holm([each.p for each in measured if each.p is not None]))
    return [_verdict(each, None if each.p is None else next(adjusted)) for each in measured]


class _Runs:
    """Runs by arm and seed."""

    def __init__(self, runs: Iterable[RunScores]) -> None:
        self.found: dict[tuple[str, int], RunScores] = {}
        for run in runs:
            if (run.arm, run.seed) in self.found:
                raise ValueError(f"two runs of arm {run.arm!r} have seed {run.seed}")
            self.found[run.arm, run.seed] = run
        self.existing = {run.arm: run for run in self.found.values() if run.existing}

    def of(self, arms: Sequence[str]) -> list[RunScores]:
        return [run for run in self.found.values() if run.arm in arms]

    def score(self, term: Term, seed: int) -> float | None:
        """None where it is missing, not a number or beyond all measure."""
        score, arm = term
        run = self.existing.get(arm) or self.found.get((arm, seed))
        value = run.scores.get(score) if run else None
        return value if value is not None and abs(value) <= LARGEST else None

    def items(self, term: Term, seed: int) -> Items:
        score, arm = term
        run = self.existing.get(arm) or self.found[arm, seed]
        return run.items.get(score, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """A claim with what the runs tell of it, before the adjustment over claims."""

    spec: ClaimSpec
    values: dict[int, float]
    tuning_values: dict[int, float]
    test: SeedTest | None = None
    bootstrap: Interval | None = None
    is_complete: bool
    is_of_seeds: bool
    notes: tuple[str, ...]

    @property
    def p(self) -> float | None:
        return self.test.p if self.test else None


def _measure(spec: ClaimSpec, table: _Runs, resamples: int, seed: int) -> _Measured:
    claim = spec.parsed
    runs = table.of(claim.arms)
    trained = [run for run in runs if not run.existing]
    tuning = sorted({run.seed for run in trained if run.tuning})
    seeds = sorted({run.seed for run in trained} - set(tuning))
    if not trained:
        seeds = [run.seed for run in runs[:1]]
    missing = _missing(claim, table, seeds)
    measured = _Measured(
        spec=spec,
        values=_values(claim, table, seeds),
        tuning_values=_values(claim, table, tuning),
        is_complete=not missing,
        is_of_seeds=bool(trained),
        notes=missing,
    )
    if missing or spec.each:
        return measured
    interval, note = _bootstrap(claim, table, seeds, resamples, seed)
    if not trained:
        return dataclasses.replace(measured, bootstrap=interval, notes=(note,) * bool(note))
    test = over_seeds(claim, list(measured.values.values()))
    notes = tuple(filter(None, (test.note, note)))
    return dataclasses.replace(measured, test=test, bootstrap=interval, notes=notes)


def _values(claim: Claim, table: _Runs, seeds: Sequence[int]) -> dict[int, float]:
    """The claim's sum by seed, of the seeds that have every score."""
    found = {}
    for seed in seeds:
        scores = {term: table.score(term, seed) for term in claim.terms}
        known = {term: score for term, score in scores.items() if score is not None}
        if len(known) == len(scores):
            found[seed] = claim.value(known)
    return found


def _missing(claim: Claim, table: _Runs, seeds: Sequence[int]) -> tuple[str, ...]:
    """What keeps the claim from being measured, in words."""
    without = [arm for arm in claim.arms if not table.of([arm])]
    if without:
        return tuple(f"there is no run of {arm}" for arm in without)
    if not seeds:
        return ("there are runs of tuning seeds only",)
    lacking = {
        term: [seed for seed in seeds if table.score(term, seed) is None] for term in claim.terms
    }
    return tuple(
        f"{score}({arm}) is missing at {_seeds(found)}"
        for (score, arm), found in lacking.items()
        if found
    )


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _bootstrap(
    claim: Claim, table: _Runs, seeds: Sequence[int], resamples: int, seed: int
) -> tuple[Interval | None, str]:
    """The bootstrap interval, or None and why; silent where no score has items."""
    items = {each: {term: table.items(term, each) for term in claim.terms} for each in seeds}
    if not any(found for terms in items.values() for found in terms.values()):
        return None, ""
    try:
        _check_means(items, table)
        interval = bootstrap(claim.terms, items, resamples=resamples, seed=seed)
    except ValueError as error:
        return None, f"no bootstrap: {error}"
    alike = "no item differs from another: the bootstrap interval is a point"
    return interval, alike if interval.low == interval.high else ""


def _check_means(items: Mapping[int, Mapping[Term, Items]], table: _Runs) -> None:
    """Raise ValueError where a score is not the mean of its items: there is no resampling it."""
    for seed, terms in items.items():
        for term, found in terms.items():
            score = table.score(term, seed)
            assert score is not None  # only claims with every score come here
            mean = math.fsum(found.values()) / len(found) if found else score
            if not math.isclose(mean, score, rel_tol=1e-6, abs_tol=1e-6):
                named = "{}({})".format(*term)
                raise ValueError(
                    f"{named} at seed {seed} is {score:.6g}, its items' mean {mean:.6g}"
                )


def _verdict(measured: _Measured, p_holm: float | None) -> Verdict:
    spec, claim, test = measured.spec, measured.spec.parsed, measured.test
    satisfied = sum(map(claim.is_met, measured.values.values()))
    count, notes = len(measured.values), measured.notes
    if not measured.is_complete:
        word = NOT_MEASURED
    elif not measured.is_of_seeds:
        word, note = _word_without_seeds(spec, satisfied == count, measured.bootstrap)
        notes = (*notes, note)
    elif count < FEWEST_SEEDS:
        word = UNDECIDED
        notes = (*notes, f"fewer than {FEWEST_SEEDS} seeds decide nothing")
    else:
        whole = HOLDS if satisfied == count else DOES_NOT_HOLD
        word = whole if test is None else _word(claim, test, measured.bootstrap, p_holm)
        if count < FEW_SEEDS and word != UNDECIDED:
            word = SUGGESTIVE + word
    return Verdict(
        claim=spec.claim,
        says=spec.says,
        source=spec.source,
        expected=spec.expected,
        each=spec.each,
        verdict=word,
        direction=claim.direction,
        threshold=claim.threshold,
        values=measured.values,
        satisfied=satisfied,
        tuning_values=measured.tuning_values,
        mean=test.mean if test else _single(measured),
        sd=test.sd if test else None,
        interval=test.interval if test else None,
        bootstrap=measured.bootstrap,
        p=measured.p,
        p_holm=p_holm,
        notes=notes,
    )


def _single(measured: _Measured) -> float | None:
    """The one value of a claim about models that exist, unless that is about each value."""
    alone = measured.is_complete and not measured.is_of_seeds and not measured.spec.each
    return next(iter(measured.values.values())) if alone else None


def _word_without_seeds(spec: ClaimSpec, is_met: bool, items: Interval | None) -> tuple[str, str]:
    """The verdict on models that were not trained here, and what it goes by."""
    claim = spec.parsed
    if spec.each:
        return HOLDS if is_met else DOES_NOT_HOLD, "models as they are: one value, no interval"
    if items is None:
        return NOT_TESTABLE, "models as they are, and no items to draw: each compares the value"
    ends = [claim.is_met(items.low), claim.is_met(items.high)]
    note = "models as they are: judged over items"
    if items.low == items.high or any(ends) != all(ends):
        return UNDECIDED, note
    return HOLDS if all(ends) else DOES_NOT_HOLD, note


def _word(claim: Claim, test: SeedTest, items: Interval | None, p_holm: float | None) -> str:
    """The verdict on a mean over enough seeds. p < .025: the whole 95 % t interval satisfies it."""
    assert test.p is not None and test.p_against is not None and p_holm is not None
    ends = [] if items is None else [claim.is_met(items.low), claim.is_met(items.high)]
    if p_holm < LEVEL and test.p < LEVEL / 2 and all(ends):
        return HOLDS
    if test.p_against < LEVEL / 2 and not any(ends):
        return DOES_NOT_HOLD
    return UNDECIDED
