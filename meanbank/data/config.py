"""What a run reads: the source, its tokenizer, its split and the shape of a batch."""

from dataclasses import dataclass

from meanbank.data.recall import RecallConfig
from meanbank.data.sources import RECALL, check_spec
from meanbank.data.tokenizer import SMALLEST_VOCABULARY


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data of one run.

    `source`: see `open_source`, or `recall` for associative recall.
    `tokenizer`: a `tokenizer.json` or a folder with one; None trains a byte-level BPE of
    `vocab_size` on the training split.
    `held_out_fraction`: the expected share of the documents held out, chosen by `split_seed`.
    `sequence_length`: tokens a row; `batch_size`: rows a batch.
    `recall`: settings of the source `recall`, whose lengths come from its curriculum; filled
    in with the defaults there, None for every other source.

    Raises ValueError for a setting out of range.
    """

    source: str = "stdlib"
    tokenizer: str | None = None
    vocab_size: int = 4096
    held_out_fraction: float = 0.1
    split_seed: int = 0
    sequence_length: int = 512
    batch_size: int = 8
    recall: RecallConfig | None = None

    def __post_init__(self) -> None:
        check_spec(self.source)
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"data.vocab_size must be at least {SMALLEST_VOCABULARY}, got {self.vocab_size}"
            )
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"data.held_out_fraction must lie between 0 and 1, got {self.held_out_fraction}"
            )
        if self.split_seed < 0:
            raise ValueError(f"data.split_seed must not be negative, got {self.split_seed}")
        for name in ("sequence_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be at least 1, got {getattr(self, name)}")
        if self.source == RECALL and self.recall is None:
            object.__setattr__(self, "recall", RecallConfig())
        if self.source != RECALL and self.recall is not None:
            raise ValueError(
                f"data.recall is for the source 'recall' only, the source is {self.source!r}"
            )
