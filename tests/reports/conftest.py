"""A complete study on disk, written once and copied for tests that change it."""

import shutil
from pathlib import Path

import pytest

from tests.reports.study_files import GROUPS, write_study


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("report") / "study")


@pytest.fixture
def study(finished_study: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_study, tmp_path / "study"))


@pytest.fixture
def small_study(tmp_path: Path) -> Path:
    """One group with two arms and two evaluations: quick to draw."""
    group = GROUPS["needle"]
    arms = {name: group["arms"][name] for name in ("needle_full", "needle_window")}
    kept = ("position-loss", "memory")
    return write_study(tmp_path / "small", {"needle": {**group, "arms": arms}}, kept)
