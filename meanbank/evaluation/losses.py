"""Token losses of a model, in one window or chunk by chunk through its cache."""

from collections.abc import Sequence

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
    prefix: Sequence[int] = (),
    document_ids: Tensor | None = None,
) -> Tensor:
    """Nats of tokens[:, 1:] given what stands before each: (B, T) -> (B, T - 1), fp32 on the CPU.

    prefix: token ids read before each row. document_ids (B, T): documents that do not see each
    other (without a prefix); None where all do.

    The sequence is read in chunks through the cache, so activations do not grow with T.
    """
    assert not prefix or document_ids is None, "a prefix would belong to no document"
    rows = torch.tensor(prefix, dtype=torch.long).expand(tokens.shape[0], -1)
    inputs = torch.cat([rows, tokens[:, :-1]], dim=1).to(model.device)
    targets = torch.cat([rows, tokens[:, 1:]], dim=1).to(
        model.device
    )  # the first are not looked at
    cache, losses = None, []
    single = inputs.shape[1] <= chunk
    for start in range(0, inputs.shape[1], chunk):
        part = slice(start, start + chunk)
        isolated = {}
        if document_ids is not None:
            isolated = {"document_ids": document_ids[:, :-1][:, part].to(model.device)}
        try:
            output = model(input_ids=inputs[:, part], cache=cache, use_cache=not single, **isolated)
        except IndexError:
            most = getattr(model.config, "max_position_embeddings", None)
            if most is None or inputs.shape[1] <= most:
                raise
            raise ValueError(
                f"the model takes at most {most} tokens, and {inputs.shape[1]} were to be read; "
                "set multiple or sequence_length to fewer"
            ) from None
        cache = None if single else output.cache
        logits = output.logits.float()
        losses.append(F.cross_entropy(logits.mT, targets[:, part], reduction="none").cpu())
    return torch.cat(losses, dim=1)[:, len(prefix) :]
