"""Settings for all tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch
from hypothesis import settings

# A busy machine is no failure, and a run must repeat.
settings.register_profile("meanbank", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("meanbank")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before."""
    torch.manual_seed(0)
