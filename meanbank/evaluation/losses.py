"""Token losses of a model, in one window or chunk by chunk through its cache."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


@torch.inference_mode()
def token_losses(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    chunk: int = 2048,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Nats of tokens[:, 1:] given what stands before each: (B, T) -> (B, T - 1), fp32 on the CPU.

    document_ids (B, T): documents that do not see each other; None where all do.

    The sequence is read in chunks through the cache, so activations do not grow with T.
    """
    inputs, targets = tokens[:, :-1].to(model.device), tokens[:, 1:].to(model.device)
    cache, losses = None, []
    single = inputs.shape[1] <= chunk
    for start in range(0, inputs.shape[1], chunk):
        part = slice(start, start + chunk)
        isolated = {}
        if document_ids is not None:
            isolated = {"document_ids": document_ids[:, :-1][:, part].to(model.device)}
        output = model(input_ids=inputs[:, part], cache=cache, use_cache=not single, **isolated)
        cache = output.cache
        logits = output.logits.float()
        losses.append(F.cross_entropy(logits.mT, targets[:, part], reduction="none").cpu())
    return torch.cat(losses, dim=1)
