"""The README's code runs as printed, and its commands name things that exist."""

import re
from pathlib import Path

import pytest

from meanbank.training import load_config

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run(capsys):
    """One after the other, as somebody reads them."""
    names = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_configurations(text, tmp_path):
    path = tmp_path / "readme.yaml"
    path.write_text(text, encoding="utf-8")
    layers = load_config(path).model_config(vocab_size=10).plans()
    assert [plan.memory.tag for plan in layers] == ["sliding_window", "kvm", "sliding_window"]
    assert [plan.values.tag for plan in layers] == ["projection", "projection", "bank"]


def test_named_configurations_exist():
    names = set(re.findall(r"meanbank (?:train|plan) (\S+)", README))
    names |= set(re.findall(r"--match (\S+)", README))
    assert len(names) >= 4
    for name in names:
        assert load_config(name).description
