import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meanbank.reports.canvas import png
from meanbank.reports.study import load_study, write_results_page, write_study_report
from tests.reports.study_files import write_evaluation, write_json, write_lines
from tests.reports.test_study_figures import FIGURES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(finished_study: Path) -> Path:
    """With one small picture for all: others are drawn elsewhere."""
    picture = png((1, 1), lambda canvas: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meanbank.reports.study.png", lambda size, draw: picture)
        write_study_report(finished_study)
    return finished_study


@pytest.fixture(scope="module")
def page(report: Path) -> str:
    return (report / "report.html").read_text(encoding="utf-8")


def test_page_has_values_figures_and_facts(page: str) -> None:
    for value in ("4.00 GiB", "12.0 TFLOP", "11, 12, 13", "KVM, 8 rows", "✗ does not hold"):
        assert f">{value}<" in page
    assert ">0.556<small>0.540, 0.556, 0.572</small><small>tuning: 0.610</small><" in page
    assert '<tr class="bad">' in page
    assert page.count('src="data:image/png;base64,') == len(FIGURES)
    assert len(re.findall(r'<img alt="[^"]{60,}"', page)) == len(FIGURES)
    for fact in ("f00dcafe", "0123abc", "2.13.0", "1,228,800", "7"):
        assert f">{fact}<" in page
    assert "CPU scale" in page and "Of 36 runs, 1 failed and 1 was not run" in page
    assert "the loss is nan at step 41" in page
    assert "training.seed 11, 12, 13; model.layers 4; matched: mlp_width 520" in page
    assert ">quick/kvm_sqrt; overrides: " in page


def test_page_needs_nothing_beside_it(page: str) -> None:
    assert "http:" not in page and "https:" not in page
    assert "<script" not in page and "<link" not in page
    assert "url(" not in page and "@import" not in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert set(re.findall(r'(?:href|src)="([a-z]+:[a-z/]+)', page)) == {
        "data:image/png",
        "data:text/csv",
    }


def test_numbers_of_the_page_are_the_files(page: str, report: Path) -> None:
    found = re.findall(r'<a download="([^"]+)" href="data:text/csv;base64,([^"]+)"', page)
    assert [name for name, _ in found] == [f"{name}.csv" for name in FIGURES]
    for name, content in found:
        assert base64.b64decode(content) == (report / "figures" / name).read_bytes()


def test_markdown_links_what_there_is(report: Path) -> None:
    text = (report / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(linked) == 2 * len(FIGURES)
    assert all((report / file).is_file() for file in linked)
    widths = [len(re.findall(r"(?<!\\)\|", x)) for x in text.splitlines() if x.startswith("| Arm")]
    assert min(widths) >= 3
    assert "\\<script\\>" not in text and "'<script>alert(1)</script>'" in text, "it is in a fence"


def test_generated_text_is_escaped(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "if x &lt; 3 &amp; y &gt; 4:" in page


def test_everything_else_is_escaped(tmp_path: Path) -> None:
    tag = '<b title="x">|$a$ [red]'
    arms = {"a": {"label": tag, "config_name": tag}, "b": {"label": f"{tag}|"}}
    group = {"label": tag, "arms": arms, "match": tag}
    plan = {"title": tag, "description": tag, "seeds": [1], "groups": {"g": group}}
    write_json(tmp_path / "study.yaml", plan)
    claim = {"claim": tag, "says": tag, "source": tag, "verdict": tag, "notes": [tag]}
    claim |= {"expected": tag, "direction": tag, "interval": {"low": 0, "high": 1, "kind": tag}}
    claim |= {"threshold": 0.5, "mean": 0.5, "values": {tag: 0.5}}
    write_json(tmp_path / "verdicts.json", {"rule": tag, "claims": [claim]})
    lines = []
    for arm in arms:
        run = tmp_path / "runs" / arm / "seed-1"
        sample = {"prompt": tag, "text": "\ud800\x00" + tag}
        write_evaluation(run, "s", "samples", {"samples": [sample]}, {})
        rows = {"rows": [{"task": tag, "length": 8, "score": 1}]}
        depths = {"depths": [{"task": tag, "length": 8, "depth": 0.5, "score": 1}]}
        write_evaluation(run, "r", "ruler", {**rows, **depths}, {})
        found = {title: f"runs/{arm}/seed-1/evaluations/{title}.json" for title in "sr"}
        job = {"group": "g", "arm": arm, "seed": 1, "scores": {f"{tag}@{tag}": 1, tag: 1}}
        made = {"overrides": {tag: tag}, "produced_by": {"commit": tag}}
        lines.append({**job, **made, "evaluations": found})
    write_lines(tmp_path / "results.jsonl", lines)
    page = write_study_report(tmp_path).read_text(encoding="utf-8")
    assert '<b title="' not in page and "\x00" not in page
    assert page.count("&lt;b title=&quot;x&quot;&gt;|$a$ [red]") > 20
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    fenced = re.sub(r"```text\n.*?\n```\n", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<b ", fenced) and "$a$" not in fenced
    for line in fenced.splitlines():
        if line.startswith("|"):
            assert not re.search(r"(?<![\\ ])\|(?=\S)", line), "only columns are apart"
    names = {file.name for file in (tmp_path / "figures").iterdir()}
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+\.(png|csv)", name) for name in names)


def test_the_same_results_give_the_same_bytes(small_study: Path) -> None:
    def contents() -> dict[str, bytes]:
        write_study_report(small_study)
        files = [file for file in small_study.rglob("*") if file.is_file()]
        return {str(file.relative_to(small_study)): file.read_bytes() for file in files}

    first = contents()
    assert contents() == first
    assert not [name for name in first if Path(name).name.startswith(".")]


def test_a_failed_report_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "study.yaml", {})
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_study_report(tmp_path)
    assert path.read_text() == "old"
    assert not list(tmp_path.rglob(".*"))


def test_a_report_of_what_there_is(tmp_path: Path) -> None:
    groups = {"g": {"label": "G", "arms": {"a": {}}}, "h": {"label": "H", "arms": None}}
    write_json(tmp_path / "study.yaml", {"title": "T", "seeds": [1], "groups": groups})
    page = write_study_report(tmp_path).read_text(encoding="utf-8")
    assert "<h1>T</h1>" in page and "was not run" in page and "<img" not in page
    assert "<h2>Claims</h2>" not in page and "Generated text" not in page
    assert not (tmp_path / "figures").exists()


def test_the_short_page(small_study: Path, tmp_path: Path) -> None:
    destination = tmp_path / "docs" / "results" / "small"
    path, _ = write_results_page(small_study, destination)
    assert path == destination / "README.md"
    text = path.read_text(encoding="utf-8")
    assert all(words in text for words in ("✓ holds", "| Arm | Parameters |", "4.00 GiB"))
    assert "How it was made" in text and "What was run" not in text
    pictures = list((destination / "figures").glob("*.png"))
    assert len(pictures) == 5 and all(file.stat().st_size < 60_000 for file in pictures)
    assert all((destination / file).is_file() for file in re.findall(r"\((figures/[^)]+)\)", text))
    assert not (small_study / "report.html").exists()
    assert load_study(small_study).absent == ()


def test_works_without_torch(tmp_path: Path) -> None:
    write_json(tmp_path / "study.yaml", {"seeds": [1], "groups": {"g": {"arms": {"a": {}}}}})
    write_json(tmp_path / "verdicts.json", {"claims": [{"claim": "c", "values": {"1": 2.0}}]})
    # A stand-in for the package above, whose own imports load torch.
    code = """
import sys, types
package = types.ModuleType("meanbank")
package.__path__ = [sys.argv[1]]
sys.modules["meanbank"] = package
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises ImportError
import meanbank.reports.study
assert not {"matplotlib", "scipy", "PIL"} & set(sys.modules)
print(meanbank.reports.study.write_study_report(sys.argv[2]))
"""
    command = [sys.executable, "-c", code, str(ROOT / "meanbank"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    assert (tmp_path / "figures" / "claims.png").is_file()
