"""Token losses of a model, in one window or chunk by chunk through its cache."""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meanbank.model import MeanbankForCausalLM

_POSITIONS = re.compile(r"(^|\.)(wpe|[a-z_]*position[a-z_]*)$")  # GPT-2's, OPT's and others' names


@torch.inference_mode()
def token_losses(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    chunk: int = 2048,
    prefix: Sequence[int] = (),
    document_ids: Tensor | None = None,
) -> Tensor:
    """Nats of tokens[:, 1:] given what stands before each: (B, T) -> (B, T - 1), fp32 on the CPU.

    prefix: token ids read before each row. document_ids (B, T): documents that do not see each
    other (without a prefix); None where all do.

    The sequence is read in chunks through the cache, so activations do not grow with T.
    """
    assert not prefix or document_ids is None, "a prefix would belong to no document"
    rows = tokens.new_tensor(prefix, dtype=torch.long).expand(tokens.shape[0], -1)
    inputs = torch.cat([rows, tokens[:, :-1]], dim=1).to(model.device)
    targets = torch.cat([rows, tokens[:, 1:]], dim=1).to(
        model.device
    )  # the first are not looked at
    check_positions(model, inputs.shape[1])
    cache, losses = None, []
    single = inputs.shape[1] <= chunk
    for start in range(0, inputs.shape[1], chunk):
        part = slice(start, start + chunk)
        given: dict[str, Any] = {"cache": cache, "use_cache": not single}
        if document_ids is not None:
            given["document_ids"] = document_ids[:, :-1][:, part].to(model.device)
        output, found = _losses(model, inputs[:, part], targets[:, part], given)
        cache = None if single else output.cache
        losses.append(found.float().cpu())
    return torch.cat(losses, dim=1)[:, len(prefix) :]


def _losses(
    model: PreTrainedModel, inputs: Tensor, targets: Tensor, given: dict[str, Any]
) -> tuple[Any, Tensor]:
    """The output, and the loss of each target: logits in fp32 would be far larger than a model."""
    if isinstance(model, MeanbankForCausalLM):
        output = model(input_ids=inputs, targets=targets, **given)
        return output, output.losses
    output = model(input_ids=inputs, **given)
    rows = zip(output.logits, targets, strict=True)
    return output, torch.stack([F.cross_entropy(x.float(), y, reduction="none") for x, y in rows])


def check_positions(model: PreTrainedModel, tokens: int) -> None:
    """Raise ValueError where a model has a table of positions, and it has fewer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            most = module.num_embeddings - getattr(module, "offset", 0)
            if tokens > most:
                raise ValueError(
                    f"the model takes at most {most} tokens, and {tokens} were to be read; give "
                    "shorter texts, or fewer tokens of them"
                )
