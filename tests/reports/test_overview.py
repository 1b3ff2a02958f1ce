"""The overview over published studies, from hand-made pages."""

import json
import re
from pathlib import Path

import pytest

from meanbank.reports.study import load_study, write_results_page
from meanbank.reports.study.overview import write_overview
from meanbank.reports.study.published import read_published
from tests.reports.study_files import write_json, write_lines

KVM, BOV = "KVM paper, arXiv 2605.09877", "BoV paper, arXiv 2606.02780"
KVM_TABLE = "Key-Value Means (arXiv 2605.09877)"
OUTCOMES = {"holds": "it does.", "reversed": "the other way."}


def claim(says: str, source: str, outcome: str, **more: object) -> dict:
    numbers = {"mean": 0.5, "interval": {"low": 0.4, "high": 0.6, "kind": "t"}, "p_holm": 0.01}
    numbers |= {"threshold": 0.3, "direction": ">=", "values": {"1": 0.45, "2": 0.5, "3": 0.55}}
    said = {"claim": f"x({says}) >= 0.3", "says": says, "source": source, "expected": "holds"}
    return {**said, **numbers, "verdict": "undecided", "outcome": outcome, "each": False, **more}


CLAIMS = [
    claim("grows", KVM, "holds"),
    claim("few", BOV, "suggestive: holds"),
    claim("sink", KVM, "not seen", notes=["added or changed when there were results already"]),
    claim("every layer", BOV, "reversed", mean=-0.5, interval={"low": -0.6, "high": -0.4}),
    claim("in all", "", "holds", each=True, mean=None, interval=None, direction="<"),
    claim("lost", "", "not measured", mean=None, interval=None, values={}),
]
UNTESTABLE = {"says": "At 32K | tokens.", "source": KVM, "why": "It needs a GPU."}


def study(folder: Path, claims: list[dict] = CLAIMS) -> Path:
    plan = {"name": "s", "title": "Small *one*", "seeds": [1], "not_testable": [UNTESTABLE]}
    arms = {"a": {"label": "A"}}
    write_json(folder / "study.yaml", {**plan, "groups": {"g": {"label": "G", "arms": arms}}})
    verdicts = {"rule": "A rule.", "outcomes": OUTCOMES, "claims": claims}
    write_json(folder / "verdicts.json", verdicts)
    seconds = {"training": 50, "evaluation": 10}
    made = {"device": "cpu", "threads": 2}
    job = {"group": "g", "arm": "a", "seconds": seconds, "produced_by": made}
    write_lines(folder / "results.jsonl", [{**job, "seed": 1}, {**job, "seed": 9, "tuning": True}])
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with one page."""
    folder = tmp_path_factory.mktemp("overview")
    page, overview = write_results_page(study(folder / "run"), folder / "results" / "my page")
    assert (page.parent.name, overview) == ("my page", folder / "results" / "README.md")
    return folder / "results"


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of a section's table by the first line of their first one."""
    (section,) = re.findall(rf"(?ms)^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text)
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    cells = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in lines]
    return {each[0].split("<br>")[0]: each[1:] for each in cells}


def test_each_paper_has_its_claims_with_their_outcomes(results: Path) -> None:
    text = (results / "README.md").read_text(encoding="utf-8")
    assert text.index("mechanisms at CPU scale") < text.index("## ")
    kvm, bov = rows(text, KVM_TABLE), rows(text, "Bank of Values (arXiv 2606.02780)")
    link, number = "[my page](my%20page/README.md#claims)", "0.500 (0.400 to 0.600)"
    claimed = "<br><small>claimed: ≥ 0.300</small>"
    assert kvm["grows"] == ["holds", f"{number}{claimed}", "3", link]
    late = "<small>added or changed when there were results already</small>"
    expected = "<br><small>expected: holds</small>"
    assert kvm["sink"][0] == f"not seen{expected}<br>{late}"
    why = "not testable at this scale<br><small>It needs a GPU.</small>"
    assert kvm["At 32K \\| tokens."] == [why, "–", "–", link]
    assert list(kvm) == ["grows", "sink", "At 32K \\| tokens."], "tested ones come first"
    assert bov["few"][0] == "suggestive: holds", "not said again where it is as expected"
    assert bov["every layer"][0] == f"reversed{expected}"
    assert bov["every layer"][1].startswith("-0.500 (-0.600 to -0.400)")
    own = rows(text, "Claims of our own")
    ends = "0.450 to 0.550<br><small>claimed: ≤ 0.300 in each seed</small>"
    assert own["in all"] == ["holds", ends, "3", link]
    assert own["lost"][:3] == [f"not measured{expected}", f"–{claimed}", "–"]
    assert "holds (1), not seen (1) and not testable at this scale (1)." in text.replace("\\", "")
    assert "- reversed: the other way." in text
    (said,) = rows(text, "Studies").values()
    assert said == ["Device cpu, Threads 2", "2", "2.0 min", "[my page](my%20page/README.md)"]


def test_what_cannot_be_tested_stands_on_the_page(results: Path) -> None:
    text = (results / "my page" / "README.md").read_text(encoding="utf-8")
    assert text.index("## Claims") < text.index("### Not testable at this scale")
    assert f"| At 32K \\| tokens.<br><small>Source: {KVM}</small> | It needs a GPU. |" in text


def test_the_files_claims_are_the_studys(results: Path) -> None:
    (page,) = read_published(results)
    found = load_study(results.parent / "run")
    kept = ("name", "says", "source", "verdict", "outcome", "each", "mean", "interval", "threshold")
    for ours, theirs in zip(page.claims, found.claims, strict=True):
        assert [getattr(ours, name) for name in kept] == [getattr(theirs, name) for name in kept]
        assert ours.values == theirs.values
    assert page.not_testable == found.not_testable
    assert (page.runs, page.seconds, page.command) == (2, 120, "meanbank study run s --out FOLDER")


def page_of(folder: Path, name: str, says: str) -> None:
    write_json(folder / name / "claims.json", {"claims": [claim(says, KVM, "holds")]})


def test_it_is_written_anew_from_all_pages(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    page_of(folder, "b", "second")
    write_overview(folder)
    page_of(folder, "a", "first")
    path = write_overview(folder)
    assert path is not None
    first = path.read_bytes()
    assert list(rows(path.read_text(), KVM_TABLE)) == ["first", "second"]
    write_overview(folder)
    assert path.read_bytes() == first


def test_a_readme_of_others_stays(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    page_of(folder, "a", "first")
    path = folder / "README.md"
    path.write_text("# Mine\n")
    assert write_overview(folder) is None
    assert path.read_text() == "# Mine\n"


def test_a_page_alone_leaves_nothing_beside_it(tmp_path: Path) -> None:
    page_of(tmp_path, "page", "first")
    assert write_overview(tmp_path) is None and not (tmp_path / "README.md").exists()
    page_of(tmp_path, "another", "second")
    assert write_overview(tmp_path) == tmp_path / "README.md"


def test_numbers_that_are_none_do_not_get_into_json(tmp_path: Path) -> None:
    odd = claim("odd", KVM, "not measured", mean=float("nan"), values={"1": float("inf")})
    (page, *_) = write_results_page(study(tmp_path / "run", [odd]), tmp_path / "results" / "a")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (page.parent / "claims.json").read_text(encoding="utf-8")
    (record,) = json.loads(text, parse_constant=refuse)["claims"]
    assert record["mean"] is None and record["values"] == {"1": None}


def test_a_torn_file_is_told(tmp_path: Path) -> None:
    page_of(tmp_path / "results", "a", "first")
    (tmp_path / "results" / "a" / "claims.json").write_text('{"claims": [')
    with pytest.raises(ValueError, match="is not valid JSON"):
        write_overview(tmp_path / "results")
