"""Published verdicts come out again: two arms of each study, with three of its seeds."""

import json
from pathlib import Path

import pytest

from meanbank.studies.engine import run_study
from meanbank.studies.launch import Processes
from meanbank.studies.report import VERDICTS, report_study
from meanbank.studies.resolve import load_study
from meanbank.studies.verdicts import SUGGESTIVE

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ARMS = {
    "quick": ("kvm_sqrt", "kvm_fixed"),
    "kvm": ("kvm_sqrt", "kvm_8"),
    "bov": ("bank", "standard"),
    "bov_tokens": ("bank_2m", "standard_2m"),
    "bov_rates": ("bank_g1_t15", "standard_m02_e3"),
    "both": ("league_sqrt", "league_sliding"),
}
SEEDS = [101, 102, 103]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ARMS)
def test_two_arms_come_to_the_published_verdicts(name, tmp_path):
    page = RESULTS / name / "claims.json"
    if not page.is_file():
        pytest.skip(f"docs/results/{name} is not published")
    published = {claim["claim"]: claim for claim in json.loads(page.read_text())["claims"]}
    study = load_study(name, [f"seeds={SEEDS}"])
    assert run_study(study, tmp_path, Processes(2), only=ARMS[name]).exit_code == 0
    report_study(tmp_path)
    claims = json.loads((tmp_path / VERDICTS).read_text())["claims"]
    measured = [claim for claim in claims if len(claim["values"]) == len(SEEDS)]
    assert measured
    for claim in measured:
        expected = published[claim["claim"]]["outcome"].removeprefix(SUGGESTIVE)
        assert claim["outcome"].removeprefix(SUGGESTIVE) == expected, claim
