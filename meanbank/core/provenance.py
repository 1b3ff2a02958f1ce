"""What produced a result: enough to run it again."""

import contextlib
import functools
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that this package runs from, with `+changes`; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = functools.partial(
            subprocess.run, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
        head = run(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changes = run(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changes else "")


@functools.cache
def machine(device: str) -> str:
    """The model of the GPU, or of the processor as the system calls it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def produced_by(*, device: str, dtype: str, seed: int | None) -> dict[str, Any]:
    """Version, commit and machine facts, as plain JSON values."""
    from meanbank import __version__

    return {
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "machine": machine(device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "seed": seed,
    }
