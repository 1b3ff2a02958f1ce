"""`meanbank plot`."""

from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meanbank.cli.overrides import Overrides, listed


def plot_mask(
    config: Annotated[str, tyro.conf.Positional],
    /,
    set: Overrides = (),
    layer: int | None = None,
    tokens: int | None = None,
    out: Path = Path("mask.png"),
    force: bool = False,
) -> int:
    """Draw who sees what: for each query which tokens are exact, which in rows, which not at all.

    Every memory of the plan is run on random queries and keys; a CSV file beside the picture has
    the same. No data or weights are needed.

    Args:
        config: a YAML file, or the name of a bundled configuration such as quick/kvm_sqrt.
        set: change one setting, as for `meanbank train`.
        layer: only the memory of that layer.
        tokens: how many, at most 4096; default three of the longest exact windows, within 48 and
            1024.
        out: the picture; the CSV file has the same name.
        force: replace the files where there are some.
    """
    from meanbank.model.visibility import FORMS, visibility
    from meanbank.reports import MaskPanel, draw_mask, write_mask
    from meanbank.training import load_config

    numbers = _beside(out, force)
    settings = load_config(config, listed(set))
    seen = visibility(settings.model_config(vocab_size=2), tokens, layer)
    panels = [MaskPanel(layers=v.layers, memory=v.memory, forms=v.forms) for v in seen]
    words = draw_mask(panels, FORMS, out)
    write_mask(panels, FORMS, numbers)
    print(f"{words}\n{out}\n{numbers}")
    return 0


def plot_memory(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    text: Path,
    layer: int | None = None,
    head: int | None = None,
    max_tokens: int = 1024,
    out: Path = Path("memory.png"),
    force: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Draw where the tokens of a text went: into rows of their own, merged, or still exact.

    For layers with compressed rows, every key/value head; below, the rows by the position of the
    token that opened them. A CSV file beside the picture has each token's row.

    Args:
        run: the folder of a run, or a Hugging Face folder of a model and its tokenizer.
        text: a UTF-8 text file.
        layer: only that layer.
        head: only that key/value head.
        max_tokens: read at most so many tokens of the text.
        out: the picture; the CSV file has the same name.
        force: replace the files where there are some.
        device: auto takes a GPU where there is one.
    """
    from meanbank.data.text_stream import check_texts, stream_tokens
    from meanbank.model.token_fates import FATES, read_fates
    from meanbank.reports import MemoryPanel, draw_token_fates, write_token_fates
    from meanbank.training import load_model

    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {max_tokens}")
    numbers = _beside(out, force)
    check_texts([text])
    model, tokenizer = load_model(run, device)
    if tokenizer is None:
        raise ValueError(f"{run} has no tokenizer: what it was trained on is not text")
    pieces = (ids for ids, _ in stream_tokens([text], tokenizer))
    ids = list(islice(chain.from_iterable(pieces), max_tokens))
    description, layers = read_fates(model, ids, layer, head)
    panels = [
        MemoryPanel(layer=f.layer, memory=f.memory, heads=f.heads, fates=f.fates, rows=f.rows)
        for f in layers
    ]
    words = draw_token_fates(panels, FATES, out)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    write_token_fates(panels, FATES, texts, numbers)
    print(f"{description}\n{words}\n{out}\n{numbers}")
    return 0


def _beside(out: Path, force: bool) -> Path:
    """The CSV file of a picture; ValueError where something is in the way."""
    if out.suffix.lower() != ".png":
        raise ValueError(f"--out must be the name of a .png file, got {out}")
    numbers = out.with_suffix(".csv")
    for path in (out, numbers):
        if path.is_dir() or (path.exists() and not force):
            raise ValueError(f"{path} exists already: give another --out, or --force to replace it")
    return numbers
