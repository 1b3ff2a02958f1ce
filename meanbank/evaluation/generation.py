"""Text generation with figures: a thin layer over Hugging Face's `generate`."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers.generation.streamers import BaseStreamer

from meanbank.data.text_stream import stream_tokens
from meanbank.model import MeanbankCache, MeanbankForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """temperature 0 is greedy; top_p keeps the most likely tokens up to that probability."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature != 0 and not 1e-3 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or at least 0.001, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def keywords(self) -> dict:
        """As `generate` takes them."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """text: the continuation; seen: tokens the memory has seen; memory_bytes: what it holds.

    tokens_per_second: of decoding, from the second token on; None where there is none.
    """

    text: str
    new_tokens: int
    tokens_per_second: float | None
    seen: int
    memory_bytes: int


class _Streamer(BaseStreamer):
    """Decodes token by token; the first call brings the prompt."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.stream = DecodeStream(skip_special_tokens=True)
        self.pieces: list[str] = []
        self.first_token_at: float | None = None
        self.count = -1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == 0:
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        piece = self.stream.step(self.tokenizer, int(value.flatten()[-1]))
        if piece:
            self.pieces.append(piece)
            self.show(piece)

    def end(self) -> None:
        pass


@torch.no_grad()
def read_texts(
    model: MeanbankForCausalLM,
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    *,
    chunk: int,
    report: Callable[[int, str], None] = lambda amount, note: None,
) -> MeanbankCache:
    """The cache after all tokens of some text files, `chunk` of them read at a time.

    report: gets the bytes done since its last call, and a note. Raises ValueError as
    `stream_tokens` does.
    """
    if chunk < 1:
        raise ValueError(f"the prefill chunk must be at least 1 token, got {chunk}")
    cache, ids = model.model.new_cache(), []

    def prefill(least: int) -> None:
        while len(ids) >= least:
            model.model(torch.tensor([ids[:chunk]], device=model.device), cache=cache)
            del ids[:chunk]

    for new, size in stream_tokens(paths, tokenizer):
        ids += new
        prefill(chunk)
        report(size, f"{cache.seen:,} tokens")
    prefill(1)
    return cache


def stream_text(
    model: MeanbankForCausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    settings: SamplingSettings,
    show: Callable[[str], None] = lambda piece: None,
    cache: MeanbankCache | None = None,
) -> Generated:
    """Continue `prompt`; `show` gets each piece of text as it comes.

    cache: of one sequence, which the prompt goes on from; nothing of it is read again, and it moves
    on. Raises ValueError for an empty prompt, also after a cache: that keeps no prediction.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt is not UTF-8 text")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    streamer = _Streamer(tokenizer, show)
    cache = model.model.new_cache() if cache is None else cache
    if len(cache.lengths) > 1:
        raise ValueError(f"the context holds {len(cache.lengths)} sequences; select one of them")
    mask = torch.ones(1, cache.seen + len(ids), dtype=torch.long)  # with columns: new ids only
    mask[:, : cache.seen - sum(cache.lengths)] = 0
    torch.manual_seed(settings.seed)
    model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        torch.tensor([ids], device=model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=settings.max_new_tokens,
        cache=cache,
        streamer=streamer,
        pad_token_id=model.config.eos_token_id,
        **settings.keywords(),
    )
    finished = time.perf_counter()
    steps = streamer.count - 1
    seconds = finished - (streamer.first_token_at or finished)
    return Generated(
        text="".join(streamer.pieces),
        new_tokens=streamer.count,
        tokens_per_second=steps / seconds if steps > 0 and seconds > 0 else None,
        seen=cache.seen,
        memory_bytes=cache.nbytes(),
    )
