"""Speed of decoding after a long context."""

import statistics
import time
from typing import Any

import torch

from meanbank.core.progress import progress
from meanbank.model import MeanbankForCausalLM

PREFILL_CHUNK = 2048
WARM_UP = 8  # steps before the timed ones


@torch.inference_mode()
def decode_speed(
    model: MeanbankForCausalLM, *, context: int = 8192, tokens: int = 64, seed: int = 0
) -> dict[str, Any]:
    """Tokens a second of batch 1, one by one, after `context` random tokens.

    tokens_per_second is over all `tokens` steps, memory updates included (let it be a multiple of
    the chunk); the median step, which has none, stands beside it. WARM_UP steps go before.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    steps = WARM_UP + tokens
    shape = (1, context + steps)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)
    cache, times = model.model.new_cache(), []
    with progress("decode speed", context + steps) as report:
        for start in range(0, context, PREFILL_CHUNK):
            part = ids[:, start : min(start + PREFILL_CHUNK, context)]
            model(input_ids=part, cache=cache, logits_to_keep=1)
            report(part.shape[1])
        for index in range(context, context + steps):
            began = time.perf_counter()
            output = model(input_ids=ids[:, index : index + 1], cache=cache)
            output.logits[0, -1].argmax().item()  # waits for the device
            times.append(time.perf_counter() - began)
            report(1)
    timed = times[WARM_UP:]
    return {
        "context": context,
        "tokens": tokens,
        "tokens_per_second": tokens / sum(timed),
        "milliseconds_per_token": 1e3 * sum(timed) / tokens,
        "median_milliseconds_per_token": 1e3 * statistics.median(timed),
        "memory_bytes": cache.nbytes(),
    }
