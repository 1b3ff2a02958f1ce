"""`meanbank demo`."""

from pathlib import Path
from typing import Annotated

import tyro


def demo(
    out: Path = Path("runs/demo"),
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    jobs: int | None = None,
) -> int:
    """Train, evaluate and compare small models on real text, and write a report.

    Five language models and three recall models with two seeds each; about ten minutes on two
    cores. What an earlier, interrupted demo finished is kept.

    Args:
        out: folder of the demo's runs and its report.html.
        force: start afresh, replacing an earlier demo.
        jobs: processes at a time; default one for each core, at most 4.
    """
    from meanbank.studies.demo import run_demo

    run_demo(out, force=force, jobs=jobs)
    return 0
