"""What a run reads: the source, its tokenizer, its split and the shape of a batch."""

from dataclasses import dataclass
from typing import Literal

from meanbank.core.config import check_least
from meanbank.data.recall import RecallConfig
from meanbank.data.sources import RECALL, check_spec
from meanbank.data.tokenizer import HUB, SMALLEST_VOCABULARY

TRAINED_VOCABULARY = 4096


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data of one run.

    `source`: see `open_source`, or `recall` for associative recall.
    `tokenizer`: a `tokenizer.json`, a folder with one, or `hf:NAME` of the Hugging Face hub; None
    trains a byte-level BPE of `vocab_size` on the training split.
    `vocab_size`: tokens of the BPE that is trained (4096 unless given), or what the named
    tokenizer must have (None: whatever it has).
    `pad_vocab_to`: the model's vocabulary is rounded up to a multiple of it; no token has the ids
    that are added.
    `held_out_fraction`: the expected share of the documents held out, chosen by `split_seed`.
    `sequence_length`: tokens a row; `batch_size`: rows a batch.
    `pack`: whether the documents of a window see those before them ("stream") or only themselves
    ("isolate"), in training and in held-out evaluations.
    `recall`: settings of the source `recall`, whose lengths come from its curriculum; filled
    in with the defaults there, None for every other source.

    Raises ValueError for a setting out of range.
    """

    source: str = "stdlib"
    tokenizer: str | None = None
    vocab_size: int | None = None
    pad_vocab_to: int = 1
    held_out_fraction: float = 0.1
    split_seed: int = 0
    sequence_length: int = 512
    batch_size: int = 8
    pack: Literal["stream", "isolate"] = "stream"
    recall: RecallConfig | None = None

    def __post_init__(self) -> None:
        check_spec(self.source)
        smallest = 1
        if self.tokenizer is None:
            smallest = SMALLEST_VOCABULARY
            if self.vocab_size is None:
                object.__setattr__(self, "vocab_size", TRAINED_VOCABULARY)
        elif self.tokenizer == HUB:
            raise ValueError("data.tokenizer: give a name after hf:, for example hf:gpt2")
        if self.vocab_size is not None and self.vocab_size < smallest:
            raise ValueError(f"data.vocab_size must be at least {smallest}, got {self.vocab_size}")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"data.held_out_fraction must lie between 0 and 1, got {self.held_out_fraction}"
            )
        check_least(self, 0, "split_seed", of="data.")
        check_least(self, 1, "sequence_length", "batch_size", "pad_vocab_to", of="data.")
        if self.source == RECALL and self.recall is None:
            object.__setattr__(self, "recall", RecallConfig())
        if self.source != RECALL and self.recall is not None:
            raise ValueError(
                f"data.recall is for the source 'recall' only, the source is {self.source!r}"
            )

    def padded(self, vocab_size: int) -> int:
        """A vocabulary rounded up to a multiple of `pad_vocab_to`."""
        return -(-vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    def model_vocab_size(self) -> int | None:
        """The model's vocabulary, padded; None where only the named tokenizer tells.

        A BPE trained on very little text may turn out smaller, and the model with it.
        """
        tokens = self.vocab_size if self.recall is None else self.recall.vocab_size
        return None if tokens is None else self.padded(tokens)
