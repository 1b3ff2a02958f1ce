"""What a model answers to prompts of token ids, greedily."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from meanbank.evaluation.losses import check_positions
from meanbank.model import batch_invariant


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], most: Sequence[int]
) -> list[list[int]]:
    """Token ids that follow each prompt: up to the end of text, which is left out, or `most`.

    Prompts are padded on the left. Models of this package answer as they do alone, bit for bit;
    with others, the last bits of logits may depend on the batch.
    """
    ends = end_ids(model)
    pad = ends[0] if ends else 0
    check_positions(model, max(map(len, prompts)) + max(most))
    rows = [torch.tensor(prompt, device="cpu") for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(list(map(torch.ones_like, rows)), batch_first=True, padding_side="left")
    with batch_invariant():
        generated = model.generate(  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(most),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=pad,
        )
    answers = generated[:, ids.shape[1] :].tolist()
    return [_until(answer[:limit], ends) for answer, limit in zip(answers, most, strict=True)]


def end_ids(model: PreTrainedModel) -> list[int]:
    """The token ids at which generation ends, none where the model has none."""
    settings = model.generation_config
    ends = None if settings is None else settings.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


def _until(ids: list[int], ends: list[int]) -> list[int]:
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]
