"""How likely a model finds given continuations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from meanbank.model import MeanbankConfig, batch_invariant

STEP = 16  # widths of rows are its multiples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """Token ids of a prompt and what follows it; those from `start` on are judged, at least one."""

    ids: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        assert 0 < self.start < len(self.ids), (self.start, len(self.ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """loss: nats of all judged tokens together; tokens: how many they are.

    greedy: whether each of them was the most likely one.
    """

    loss: float
    tokens: int
    greedy: bool


def most_tokens(model: PreTrainedModel) -> int | None:
    """The longest input that the model takes; None where it takes any, as models of ours do."""
    if isinstance(model.config, MeanbankConfig):
        return None
    return getattr(model.config, "max_position_embeddings", None)


def fitted(row: Continuation, most: int | None, keep: int) -> tuple[Continuation, int]:
    """The row whose input has at most `most` tokens, and how many were cut out of it.

    They are cut from the left, behind the first `keep` tokens. The last token is judged only, so it
    is no input. Raises ValueError where the continuation alone is too long.
    """
    surplus = 0 if most is None else len(row.ids) - 1 - most
    if surplus <= 0:
        return row, 0
    start = row.start - surplus
    if start < max(keep, 1):
        raise ValueError(
            f"a continuation of {len(row.ids) - row.start} tokens does not fit the {most} tokens "
            "that the model takes"
        )
    return Continuation(ids=row.ids[:keep] + row.ids[keep + surplus :], start=start), surplus


@torch.inference_mode()
def judge(
    model: PreTrainedModel, rows: Sequence[Continuation], *, batch_size: int
) -> list[Judgement]:
    """Judge every row; `batch_size` inputs are read at once, and equal ones once.

    Rows are padded on the right, under an attention mask, to a width that depends on the row alone.
    Models of ours read them one by one (`batch_invariant`), so no score depends on `batch_size`.
    """
    inputs = dict.fromkeys((row.ids[:-1], row.start) for row in rows)
    by_shape: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]] = {}
    for ids, start in inputs:
        width = _multiple(len(ids))
        by_shape.setdefault((width, _multiple(width - start + 1)), []).append((ids, start))
    waiting: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        waiting.setdefault((row.ids[:-1], row.start), []).append(number)
    found: dict[int, Judgement] = {}
    for (width, kept), group in by_shape.items():
        for first in range(0, len(group), batch_size):
            part = group[first : first + batch_size]
            logits = _last_logits(model, [ids for ids, _ in part], width, kept)
            for key, of_row in zip(part, logits, strict=True):
                for number in waiting[key]:
                    found[number] = _judgement(of_row, rows[number], width)
    return [found[number] for number in range(len(rows))]


def _multiple(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def _last_logits(
    model: PreTrainedModel, inputs: Sequence[tuple[int, ...]], width: int, kept: int
) -> Tensor:
    """Logits (B, kept, V) at the last `kept` of `width` positions."""
    rows = [torch.tensor(tokens, device="cpu") for tokens in inputs]
    padded = pad_sequence(rows, batch_first=True)
    ids = F.pad(padded, (0, width - padded.shape[1]))
    lengths = torch.tensor([[len(row)] for row in rows], device="cpu")
    mask = torch.arange(width, device="cpu") < lengths
    with batch_invariant():
        output = model(
            input_ids=ids.to(model.device),
            attention_mask=mask.long().to(model.device),
            use_cache=False,
            logits_to_keep=kept,
        )
    return output.logits[:, -kept:]


def _judgement(logits: Tensor, row: Continuation, width: int) -> Judgement:
    kept = min(len(logits), width)
    before = row.start - 1 - (width - kept)  # the logits there tell the first judged token
    targets = torch.tensor(row.ids[row.start :], device=logits.device)
    logits = logits[before : before + len(targets)].float()
    losses = -logits.log_softmax(-1).gather(1, targets[:, None])
    return Judgement(
        loss=losses.double().sum().item(),
        tokens=len(targets),
        greedy=bool((logits.argmax(-1) == targets).all()),
    )
