"""A complete demo on disk, written once and copied for tests that change it."""

import shutil
from pathlib import Path

import pytest

from tests.reports.report_files import write_demo


@pytest.fixture(scope="session")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("report") / "demo")


@pytest.fixture
def demo(finished_demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_demo, tmp_path / "demo"))
