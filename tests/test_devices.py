"""Another device than the CPU, emulated in a process of its own: PyTorch keeps it for good."""

import subprocess
import sys

import pytest
from torch.utils import backend_registration


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch emulates no device",
)
@pytest.mark.parametrize("which", [["--few"], pytest.param([], marks=pytest.mark.slow)])
def test_a_device_computes_what_the_cpu_does(which):
    command = [sys.executable, "-m", "tests.check_device", "emulated", *which]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("passed ") >= 4
    assert "0 failed on emulated" in found.stdout
