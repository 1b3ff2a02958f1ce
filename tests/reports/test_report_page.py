import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meanbank.reports import draw_figures, load_demo, write_report
from tests.reports.report_files import write_evaluation, write_json, write_language_arm

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ["overview", "loss-by-position", "recall-by-pairs", "memory", "training"]


@pytest.fixture(scope="module")
def page(finished_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    copy = shutil.copytree(finished_demo, tmp_path_factory.mktemp("page") / "demo")
    return write_report(copy).read_text(encoding="utf-8")


def test_figures_are_real_pictures(demo: Path) -> None:
    import matplotlib.image

    figures = draw_figures(load_demo(demo), demo / "figures")
    assert list(figures) == FIGURES
    for figure in figures.values():
        picture = matplotlib.image.imread(figure.path)
        assert figure.path == demo / "figures" / f"{figure.name}.png"
        assert picture.shape[1] >= 900
        assert picture[..., :3].std() > 0.05, f"{figure.name} is blank"
        assert figure.caption and figure.alternative


def test_page_has_values_figures_and_facts(page: str) -> None:
    for value in ("1.712", "2.345", "4.00 GiB", "65.5", "0.354", "+0.556", "KVM, 8 rows"):
        assert f">{value}<" in page
    assert page.count('src="data:image/png;base64,') == len(FIGURES)
    assert len(re.findall(r'<img alt="[^"]{40,}"', page)) == len(FIGURES)
    for fact in ("f00dcafe", "0123abc", "2.13.0", "1,228,800", "0, 1"):
        assert f">{fact}<" in page
    assert "no error bar over seeds" in page and "CPU scale" in page


def test_page_needs_nothing_beside_it(page: str) -> None:
    assert "http:" not in page and "https:" not in page
    assert "<script" not in page and "<link" not in page and "href=" not in page
    assert "url(" not in page and "@import" not in page


def test_generated_text_is_escaped(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "if x &lt; 3 &amp; y &gt; 4:" in page


def test_everything_else_is_escaped(demo: Path) -> None:
    tag = '<b title="x">$a$ [red]'
    run = {"description": tag, "commit": tag, "data": {tag: tag}}
    write_json(demo / "language" / "full" / "run.json", run)
    write_evaluation(demo / "language" / "full", "bpb", {"bpb": 1.0}, note=tag)
    write_json(demo / "samples.json", [{"arm": tag, "prompt": tag, "text": "\ud800\x00" + tag}])
    page = write_report(demo).read_text(encoding="utf-8")
    assert '<b title="' not in page and "\x00" not in page
    assert "&lt;b title=&quot;x&quot;&gt;$a$ [red]" in page


def test_the_same_results_give_the_same_bytes(demo: Path) -> None:
    first = write_report(demo).read_bytes()
    assert write_report(demo).read_bytes() == first
    assert not list(demo.glob(".*")) and not list((demo / "figures").glob(".*"))


def test_a_failed_report_leaves_the_old_one(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo / "report.html"
    path.write_text("old")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(demo)
    assert path.read_text() == "old"
    assert not list(demo.rglob(".*"))


def test_a_report_of_what_there_is(tmp_path: Path) -> None:
    write_json(tmp_path / "bigram.json", {"results": {"bpb": 2.345}})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "2.345" in page and "<td>–</td>" in page and "<img" not in page
    write_language_arm(tmp_path, "kvm_fixed", steps=1)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("<img") == 4, "all but recall"


def test_figures_bear_odd_numbers(demo: Path) -> None:
    nan = float("nan")
    arm = demo / "language" / "full"
    write_json(arm / "run.json", {"description": "Diverged"})
    (arm / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3}\n')
    buckets = [{"start": 0, "stop": 512, "loss": nan}, {"start": 512, "stop": 1024, "loss": nan}]
    write_evaluation(arm, "position-loss", {"training_length": 512, "buckets": buckets})
    write_evaluation(arm, "memory", {"contexts": [{"tokens": 0, "bytes": 0}]})
    assert list(draw_figures(load_demo(demo), demo / "figures")) == FIGURES


def test_works_without_torch(demo: Path) -> None:
    # A stand-in for the package above, whose own imports load torch.
    code = """
import sys, types
package = types.ModuleType("meanbank")
package.__path__ = [sys.argv[1]]
sys.modules["meanbank"] = package
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises ImportError
import meanbank.reports
assert "matplotlib" not in sys.modules
print(meanbank.reports.write_report(sys.argv[2]))
"""
    command = [sys.executable, "-c", code, str(ROOT / "meanbank"), str(demo)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
