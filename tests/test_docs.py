"""The documentation's code runs as printed, its commands and links name what exists."""

import re
from pathlib import Path

import pytest

from meanbank.training import load_config

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
}
GUIDES = [name for name in PAGES if name == "README.md" or name.startswith("docs/")]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[name], flags=re.DOTALL)


@pytest.mark.parametrize("name", [name for name in GUIDES if blocks(name, "python")])
def test_python_blocks_run(name, capsys):
    """One after the other, as somebody reads them."""
    names = {}
    for code in blocks(name, "python"):
        exec(compile(code, name, "exec"), names)
        assert capsys.readouterr().out


@pytest.mark.parametrize("text", sorted({t for name in GUIDES for t in blocks(name, "yaml")}))
def test_yaml_blocks_are_configurations(text, tmp_path):
    path = tmp_path / "page.yaml"
    path.write_text(text, encoding="utf-8")
    layers = load_config(path).model_config(vocab_size=10).plans()
    assert [plan.memory.tag for plan in layers] == ["sliding_window", "kvm", "sliding_window"]
    assert [plan.values.tag for plan in layers] == ["projection", "projection", "bank"]


def test_named_configurations_exist():
    text = "\n".join(PAGES[name] for name in GUIDES)
    names = set(re.findall(r"meanbank (?:train|plan) ([\w./-]+)", text))
    names |= set(re.findall(r"--match (\S+)", text))
    assert len(names) >= 4
    for name in names:
        assert load_config(name).description


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[name]):
        file, _, anchor = link.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), link


def test_every_page_is_in_the_readme():
    others = {"README.md", "CHANGELOG.md", "docs/index.md", "docs/reference.md"}  # of the site
    for name in PAGES.keys() - others:
        assert f"]({name})" in PAGES["README.md"], name
