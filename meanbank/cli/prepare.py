"""`meanbank prepare`."""

import time
from typing import TYPE_CHECKING, Annotated

import tyro

from meanbank.cli.overrides import Overrides, listed

if TYPE_CHECKING:
    from meanbank.data import DataConfig, Part


def prepare(
    what: Annotated[str, tyro.conf.Positional],
    /,
    set: Overrides = (),
    workers: int | None = None,
) -> int:
    """Build the token files of a run beforehand; training and evaluation find them in the cache.

    A build that was interrupted goes on where it was when the same command runs again.

    Args:
        what: a YAML file or the name of a bundled configuration, or a source: stdlib, files:GLOB or
            hf:NAME[:SPLIT].
        set: change settings as for train, such as data.tokenizer=hf:gpt2 data.max_tokens=1000000.
        workers: processes that encode; the result is the same. Default: MEANBANK_WORKERS, or this
            process only, with the tokenizer's own threads.
    """
    from meanbank.data import prepare_corpus

    config = _data_config(what, listed(set))
    started = time.monotonic()
    corpus = prepare_corpus(config, workers=workers)
    seconds = time.monotonic() - started
    for part in corpus.parts:
        _print_part(part)
    encoded = sum(part.encoded for part in corpus.parts)
    if encoded:
        rate = encoded / max(seconds, 1e-9)
        print(f"encoded {encoded:,} tokens in {seconds:.1f} s ({rate:,.0f} tokens/s)")
    else:
        print(f"found prepared, in {seconds:.1f} s")
    return 0


def _data_config(what: str, overrides: list[str]) -> "DataConfig":
    """The data settings of a configuration, or the default ones with another source."""
    from pathlib import Path

    from meanbank.core.config import apply_override, build
    from meanbank.data import DataConfig
    from meanbank.training import load_config

    kind, colon, _ = what.partition(":")
    if what != "stdlib" and not (colon and kind in ("files", "hf")):
        return load_config(what, overrides).data
    settings = {"data": {"source": what}}
    for override in overrides:
        apply_override(settings, override)
    if unused := [name for name in settings if name != "data"]:
        raise ValueError(f"a source has settings of data only, not of {unused[0]}")
    return build(DataConfig, settings["data"], "data").anchored(Path.cwd())


def _print_part(part: "Part") -> None:
    print(f"{part.name}: {part.folder}")
    for side in ("train", "held_out"):
        told = (f"{part.description[name][side]:,} {name}" for name in _COUNTS)
        print(f"  {side.replace('_', ' ')}: {', '.join(told)}")


_COUNTS = ("documents", "tokens", "bytes")
