"""`meanbank generate`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    prompt: str,
    context: Path | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    bank_storage: Literal["resident", "mmap", "int8"] = "resident",
) -> int:
    """Go on with a prompt; text streams to stdout, figures to stderr.

    Args:
        run: the folder of a run, or a Hugging Face folder of a model and its tokenizer.
        prompt: the text to go on with; - reads it from standard input.
        context: a file that `meanbank context build` wrote; the prompt follows what is in it, and
            nothing of that is read again.
        max_new_tokens: tokens to generate; less when the model ends the text.
        temperature: 0 takes the most likely token; otherwise tokens are drawn at this temperature.
        top_p: draw from the most likely tokens that together have this probability.
        seed: of the draws.
        device: auto takes a GPU where there is one.
        bank_storage: where tables over token ids are: in memory, in the model's files, or in memory
            in int8.
    """
    from meanbank.evaluation.generation import SamplingSettings, stream_text
    from meanbank.model import MeanbankCache
    from meanbank.training import load_model

    settings = SamplingSettings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    model, tokenizer = load_model(run, device, bank_storage)
    if tokenizer is None:
        raise ValueError(f"{run} has no tokenizer: what it was trained on is not text")
    cache = context and MeanbankCache.load(context, model, tokenizer=tokenizer)
    text = read_prompt() if prompt == "-" else prompt

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    show(text.encode("utf-8", "replace").decode("utf-8"))
    result = stream_text(model, tokenizer, text, settings, show, cache)
    show("\n")
    speed = result.tokens_per_second
    print(
        f"{result.new_tokens} tokens, {'-' if speed is None else f'{speed:,.1f}'} tokens/s, "
        f"{result.memory_bytes / 2**10:,.1f} KiB of memory after {result.seen} tokens",
        file=sys.stderr,
    )
    return 0


def read_prompt() -> str:
    """All of standard input, which must be UTF-8."""
    if sys.stdin is None:
        raise ValueError("the prompt is to come from standard input, which is closed")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("the prompt on standard input is not UTF-8 text") from None
