"""What is shipped is complete and says nothing about the machine that it was made on."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import meanbank

ROOT = Path(__file__).resolve().parents[1]
YAML = sorted(path for name in ("configs", "studies") for path in (ROOT / name).rglob("*.y*ml"))


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert meanbank.__version__ == project["version"]


def test_typed_marker_is_shipped() -> None:
    assert (ROOT / "meanbank" / "py.typed").is_file()


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_has_a_header(path: Path) -> None:
    first_line = path.read_text(encoding="utf-8").lstrip().partition("\n")[0]
    assert re.match(r"#\s*\w", first_line), "start with a comment: command, cost, what to expect"


def test_no_paths_of_a_build_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    private = re.compile(rf"(?<![\w.])/(home|Users|root)/\w|{re.escape(str(ROOT))}\b".encode())
    found = [
        name
        for name in names.split("\0")
        if (ROOT / name).is_file() and private.search((ROOT / name).read_bytes())
    ]
    assert not found
