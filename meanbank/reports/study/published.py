"""`claims.json` of a published page: what an overview over several studies needs of each."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meanbank.reports.files import as_count, as_number, as_object, read_json, write_whole
from meanbank.reports.study.document import command
from meanbank.reports.study.loading import claims_of, not_testable_of, outcomes_of, said
from meanbank.reports.study.provenance import software, work
from meanbank.reports.study.results import Claim, NotTestable, Study

CLAIMS = "claims.json"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A page: its folder's name, and of its study what the fields say.

    seconds: of training and evaluation, all finished runs together. machine: versions, device and
    threads by name. outcomes: what each outcome of a claim means.
    """

    folder: str
    name: str
    title: str
    command: str
    runs: int
    seconds: float | None
    machine: dict[str, str]
    outcomes: dict[str, str]
    claims: tuple[Claim, ...]
    not_testable: tuple[NotTestable, ...]


def write_published(destination: Path, study: Study) -> None:
    """Write `claims.json` into the folder of a study's page.

    A claim is as in the study's `verdicts.json`, less what an overview does not need.
    """
    runs, seconds = work(study)
    content = {
        "name": study.name,
        "title": study.title,
        "command": command(study),
        "runs": runs,
        "seconds": round(seconds),
        "machine": dict(software(study)),
        "rule": study.rule,
        "outcomes": dict(study.outcomes),
        "claims": [_record(claim) for claim in study.claims],
        "not_testable": [asdict(claim) for claim in study.not_testable],
    }
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(destination / CLAIMS, f"{text}\n".encode("utf-8", "replace"))


def read_published(parent: Path) -> Iterator[Published]:
    """The pages in a folder, by their folders' names.

    Raises ValueError for a `claims.json` that is not JSON.
    """
    for path in sorted(parent.glob(f"*/{CLAIMS}")):
        record = as_object(read_json(path))
        name = said(record.get("name"))
        yield Published(
            folder=path.parent.name,
            name=name,
            title=said(record.get("title")) or name,
            command=said(record.get("command")),
            runs=as_count(record.get("runs")) or 0,
            seconds=as_number(record.get("seconds")),
            machine={key: said(value) for key, value in as_object(record.get("machine")).items()},
            outcomes=outcomes_of(record),
            claims=claims_of(record),
            not_testable=not_testable_of(record),
        )


def _record(claim: Claim) -> dict[str, Any]:
    low, high = claim.interval or (None, None)
    return {
        "claim": claim.name,
        "says": claim.says,
        "source": claim.source,
        "expected": claim.expected,
        "each": claim.each,
        "verdict": claim.verdict,
        "outcome": claim.outcome,
        "mean": _finite(claim.mean),
        "interval": {"low": _finite(low), "high": _finite(high), "kind": claim.interval_kind},
        "direction": claim.direction,
        "threshold": _finite(claim.threshold),
        "p_holm": _finite(claim.p_holm),
        "values": {seed: _finite(value) for seed, value in claim.values.items()},
        "notes": list(claim.notes),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
