"""`meanbank context`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def build_context(
    run: Annotated[Path, tyro.conf.Positional],
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    out: Path,
    prefill_chunk: int = 1024,
    force: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Read text files once and keep what the model remembers; `generate --context` goes on from it.

    Args:
        run: the folder of a run, or a Hugging Face folder of a model and its tokenizer.
        files: UTF-8 text files, read one after the other, with the end-of-text token in between.
        out: the file to write; Ctrl-C leaves none.
        prefill_chunk: tokens read at a time: larger is faster and needs more memory.
        force: replace the file where there is one.
        device: auto takes a GPU where there is one.
    """
    from meanbank.core.progress import progress
    from meanbank.data.text_stream import check_texts
    from meanbank.evaluation.generation import read_texts
    from meanbank.training import load_model

    if out.is_dir() or (out.exists() and not force):
        raise ValueError(f"{out} exists already: give another --out, or --force to replace it")
    if prefill_chunk < 1:
        raise ValueError(f"--prefill-chunk must be at least 1 token, got {prefill_chunk}")
    size = check_texts(files)
    model, tokenizer = load_model(run, device)
    if tokenizer is None:
        raise ValueError(f"{run} has no tokenizer: what it was trained on is not text")
    with progress("reading", size) as report:
        cache = read_texts(model, tokenizer, files, chunk=prefill_chunk, report=report)
    cache.save(out, model, tokenizer=tokenizer, overwrite=force)
    print(
        f"{out}: {cache.seen:,} tokens of {size:,} bytes of text in {out.stat().st_size:,} bytes, "
        f"{cache.nbytes():,} of them states"
    )
    return 0


def show_context(file: Annotated[Path, tyro.conf.Positional], /) -> int:
    """Tell what a context file holds, from its header alone: no model is loaded.

    Args:
        file: what `meanbank context build`, or `cache.save`, wrote.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from meanbank.model.context_file import read_summary

    summary = read_summary(file)
    lengths = sorted(set(summary.lengths))
    tokens = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    facts = {
        "sequences": f"{len(summary.lengths):,}",
        "tokens": tokens,
        "bytes of states": f"{summary.nbytes:,}",
        "bytes of the file": f"{summary.file_nbytes:,}",
        "dtype": summary.dtype,
        "model": summary.model,
        "tokenizer": summary.tokenizer or "-",
        "written by": f"meanbank {summary.written_by}, format {summary.version}",
    }
    about = Table(show_header=False, box=None)
    for name, value in facts.items():
        about.add_row(name, value)
    table = Table(title="layers", title_justify="left")
    for name in ("layer", "memory", "compressed rows", "exact tokens", "bytes"):
        table.add_column(name, justify="left" if name in ("layer", "memory") else "right")
    for layer in summary.layers:
        numbers = (layer.rows, layer.tokens, layer.nbytes)
        table.add_row(layer.name, escape(layer.memory), *(f"{number:,}" for number in numbers))
    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own, and rich would take 80 columns
        console = Console(width=100)
    console.print(about)
    console.print(table)
    return 0
