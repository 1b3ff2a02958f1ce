"""What comes before the loop of a run: its data, its folder, and warnings."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from meanbank.model import MeanbankForCausalLM
from meanbank.training.claim import check_unclaimed, claimed, recorded
from meanbank.training.config import RunConfig
from meanbank.training.ranks import Ranks
from meanbank.training.run import (
    TrainingData,
    check_free,
    check_resumable,
    check_same_data,
    make_run,
    open_data,
    write_config,
)


def check_ranks(config: RunConfig, ranks: Ranks) -> None:
    """Raise ValueError where a rank would have no row for one of its parts of a batch."""
    parts, rows = config.training.accumulation, config.data.batch_size
    if ranks.size * parts > rows:
        raise ValueError(
            f"{ranks.size} ranks with training.accumulation = {parts} need at least "
            f"{ranks.size * parts} rows a batch, but data.batch_size is {rows}"
        )


def checked_data(
    config: RunConfig, out: Path, ranks: Ranks, resume: bool, force: bool
) -> TrainingData:
    """The data of a run; rank 0 looks whether the folder is as it should be, too."""
    if not ranks.leads:
        return open_data(config)
    check_unclaimed(out)
    if resume:
        check_resumable(out, config)
    else:
        check_free(out, force=force)  # before minutes go into the data
    data = open_data(config)
    if resume:
        check_same_data(out, data)
    return data


@contextlib.contextmanager
def prepared_run(config: RunConfig, out: Path, resume: bool, force: bool) -> Iterator[None]:
    """Have the run's folder, and write down how what happens in it ends."""
    with claimed(out):  # last: wrong input must leave what is there alone
        if resume:
            check_resumable(out, config)
            write_config(out, config)  # with what may have changed
        else:
            make_run(out, config, force=force)
        with recorded(out):
            yield


def warn_of_idle_memories(model: MeanbankForCausalLM, config: RunConfig) -> None:
    """Say so on stderr where no training sequence is long enough for a memory to compress any."""
    if config.data.recall is not None:
        return
    length = config.data.sequence_length
    for layer, block in enumerate(model.model.layers):
        exact = getattr(getattr(block.attention, "memory", None), "exact_tokens", None)
        if exact is not None and length <= exact:
            print(
                f"warning: layer {layer} keeps {exact} tokens exactly and training sequences have "
                f"{length}, so its compressed memory is never used; give it a smaller chunk_size",
                file=sys.stderr,
            )
            return
