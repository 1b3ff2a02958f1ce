"""From the results of a study to verdicts on its claims, and to its report.

STUDY/verdicts.json    the rule, the claims with their verdicts and outcomes, what outcomes mean,
                       and arms compared item by item
STUDY/report.html ...  see `meanbank.reports.study`
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meanbank.core.config import build
from meanbank.core.files import read_json, write_json
from meanbank.evaluation.driver import read_records
from meanbank.reports import write_study_report
from meanbank.studies.comparisons import DifferentItems, compare_arms
from meanbank.studies.engine import CLAIMS
from meanbank.studies.evaluations import RECORDS
from meanbank.studies.job import Job, jobs_of
from meanbank.studies.outcomes import OUTCOMES, outcome
from meanbank.studies.resolve import Study, read_study
from meanbank.studies.results import Result, read_results
from meanbank.studies.verdicts import RULE, RULE_OF_MODELS, ClaimSpec, RunScores, judge

VERDICTS = "verdicts.json"


def report_study(folder: Path) -> Path:
    """Judge the claims of a study by what is finished, and write its report; returns its path.

    Raises ValueError for a folder that is not a study's.
    """
    study = read_study(folder)
    finished = {(result["arm"], result["seed"]): result for result in read_results(folder)}
    runs = [run_scores(job, finished.get((job.name, job.seed))) for job in jobs_of(study, folder)]
    first = build(tuple[ClaimSpec, ...], read_json(folder / CLAIMS), str(folder / CLAIMS))
    at_first = {(claim.claim, claim.each) for claim in first}  # what a verdict depends on
    claims = [
        {
            **verdict.plain(),
            "outcome": outcome(verdict),
            "added": (verdict.claim, verdict.each) not in at_first,
        }
        for verdict in judge(study.claims, runs)
    ]
    compared = list(compare_groups(study, runs))
    rule = f"{RULE} {RULE_OF_MODELS}" if any(run.existing for run in runs) else RULE
    judged = {"rule": rule, "outcomes": OUTCOMES, "claims": claims, "comparisons": compared}
    write_json(folder / VERDICTS, judged)
    return write_study_report(folder)


def run_scores(job: Job, result: Result | None) -> RunScores:
    """What a run scored by its line of results; nothing where it has none."""
    files = [] if result is None else [*records_of(job, result).values()]
    if result is None or not all(path.is_file() for path in files):  # a lost one is made again
        scores, items = {}, {}
    else:
        scores, items = result["scores"], items_of(job, result)
    return RunScores(
        arm=job.name,
        seed=job.seed,
        tuning=job.tuning,
        existing=not job.arm.is_trained_here,
        scores=scores,
        items=items,
    )


def records_of(job: Job, result: Result) -> dict[str, Path]:
    """Files of records by evaluation."""
    return {title: job.evaluations / f"{title}{RECORDS}" for title in result["evaluations"]}


def items_of(job: Job, result: Result) -> dict[str, dict[str, float]]:
    """{score: {sample id: value}} of the scores that are means over samples."""
    found: dict[str, dict[str, float]] = {}
    for path in records_of(job, result).values():
        try:
            for record in read_records(path):
                for score, value in record.get("scores", {}).items():
                    found.setdefault(score, {})[record["id"]] = float(value)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{path} was changed or torn; remove it, and `meanbank study run` does it again"
            ) from None
    return found


def compare_groups(study: Study, runs: list[RunScores]) -> Iterator[dict[str, Any]]:
    """In each group, what arms are held against with each other one, by scores that have items."""
    for name, group in study.groups.items():
        reference = group.reference or next(iter(group.arms))
        for arm in group.arms:
            if arm == reference:
                continue
            try:
                compared = compare_arms(runs, reference, arm)
            except DifferentItems as error:
                print(f"warning: {error}; they are not compared item by item", file=sys.stderr)
                continue
            for comparison in compared:
                yield {"group": name, **comparison.plain()}
