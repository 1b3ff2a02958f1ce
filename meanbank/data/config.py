"""What a run reads: its sources, their tokenizer and split, and the shape of a batch."""

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from meanbank.core.config import check_least
from meanbank.data.recall import RecallConfig
from meanbank.data.sources import RECALL, anchored_spec, check_spec
from meanbank.data.stages import BatchStage, LengthStage, check_lengths, stage_ends
from meanbank.data.tokenizer import HUB, SMALLEST_VOCABULARY
from meanbank.data.windows import Pack

TRAINED_VOCABULARY = 4096
LONGEST_CYCLE = 10_000
ROWS = 8  # a batch, unless given


@dataclass(frozen=True, kw_only=True)
class WeightedSource:
    """One of several sources: a source, see `open_source`, and its share of the training tokens.

    `weight`: relative to the weights of the others.
    """

    source: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_spec(self.source)
        if self.source == RECALL:
            raise ValueError("the source 'recall' cannot be mixed with others")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"a weight must be positive, got {self.weight} for {self.source!r}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data of one run.

    `source`: see `open_source`, or `recall` for associative recall; or several sources, each with
    its weight (`WeightedSource`). Of several, training draws windows in proportion to the weights,
    each source has its own epochs and its own split, and one tokenizer is for all of them.
    `tokenizer`: a `tokenizer.json`, a folder with one, or `hf:NAME` of the Hugging Face hub; None
    trains a byte-level BPE of `vocab_size` on the training split, of several sources in proportion
    to the weights. With a tokenizer that is named, a source is read once only.
    `vocab_size`: tokens of the BPE that is trained (4096 unless given), or what the named
    tokenizer must have (None: whatever it has).
    `pad_vocab_to`: the model's vocabulary is rounded up to a multiple of it; no token has the ids
    that are added.
    `held_out_fraction`: the expected share of the documents held out, chosen by `split_seed`.
    `min_document_tokens`: shorter documents are left out, of both splits; the end-of-text token
    counts.
    `max_documents`, `max_tokens`: of each source, both splits together; reading stops with the
    document that reaches one of them, which is kept whole. So a part of a huge set is enough.
    `sequence_length`: tokens a row; `batch_size`: rows a batch, of all ranks and accumulated parts
    together; `batch_tokens`: the same in tokens, which gives `batch_size`.
    `sequence_lengths`: of text, shorter rows at first: stages, each a `fraction` of the steps with
    rows of a `length` that divides `sequence_length`, which the last one has. A step keeps its
    tokens, cut into more rows: batch_size x sequence_length / length.
    `pack`: what a row holds. "stream": a window of the stream of documents, which see those before
    them. "isolate": the same windows, but a document sees only itself. "document": a piece of one
    document; what is shorter than a row, or is left at a document's ends, is in no row of that
    epoch. In held-out evaluations a document sees those before it with "stream" only.
    `workers`: threads that make training batches ahead; 0 makes each when it is needed. Whatever
    their number, batches are the same.
    `recall`: settings of the source `recall`, whose lengths come from its curriculum; filled
    in with the defaults there, None for every other source.

    Raises ValueError for a setting out of range.
    """

    source: tuple[WeightedSource, ...] | str = "stdlib"
    tokenizer: str | None = None
    vocab_size: int | None = None
    pad_vocab_to: int = 1
    held_out_fraction: float = 0.1
    split_seed: int = 0
    min_document_tokens: int | None = None
    max_documents: int | None = None
    max_tokens: int | None = None
    sequence_length: int = 512
    batch_size: int = ROWS
    batch_tokens: int | None = None
    sequence_lengths: tuple[LengthStage, ...] = ()
    pack: Pack = "stream"
    workers: int = 0
    recall: RecallConfig | None = None

    def __post_init__(self) -> None:
        self._check_sources()
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
        check_least(self, 0, "split_seed", "workers", of="data.")
        ones = ("sequence_length", "batch_size", "pad_vocab_to", "max_tokens")
        check_least(self, 1, *ones, of="data.")
        check_least(self, 2, "min_document_tokens", "max_documents", of="data.")
        if self.source == RECALL and self.recall is None:
            object.__setattr__(self, "recall", RecallConfig())
        if self.source != RECALL and self.recall is not None:
            raise ValueError(
                f"data.recall is for the source 'recall' only, the source is {self.source!r}"
            )
        if self.sequence_lengths and self.recall is not None:
            raise ValueError(
                "data.sequence_lengths is for text; the source 'recall' has the lengths of its "
                "data.recall.curriculum"
            )
        if self.sequence_lengths:
            check_lengths(self.sequence_lengths, self.sequence_length)
        if self.batch_tokens is not None:
            object.__setattr__(self, "batch_size", self._rows(self.batch_tokens))

    def _rows(self, tokens: int) -> int:
        """Rows of a batch of so many tokens."""
        if self.source == RECALL:
            raise ValueError("data.batch_tokens is not for the source 'recall': set batch_size")
        rows, rest = divmod(tokens, self.sequence_length)
        if rest or rows < 1:
            raise ValueError(
                f"data.batch_tokens must be a multiple of sequence_length "
                f"({self.sequence_length}), got {tokens}"
            )
        if self.batch_size not in (ROWS, rows):
            raise ValueError(
                f"data.batch_tokens = {tokens} makes {rows} rows of {self.sequence_length} tokens, "
                f"but data.batch_size is {self.batch_size}: give one of them"
            )
        return rows

    def _check_sources(self) -> None:
        if isinstance(self.source, str):
            return check_spec(self.source)
        names = [share.source for share in self.source]
        if not names:
            raise ValueError("data.source must name at least one source")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"data.source names {twice[0]!r} more than once")
        if sum(self.turns()) > LONGEST_CYCLE:
            weights = ", ".join(str(share.weight) for share in self.source)
            raise ValueError(
                f"the weights of data.source ({weights}) need a cycle of {sum(self.turns())} "
                f"windows to come out, at most {LONGEST_CYCLE} are allowed: round them, for "
                "example to three digits"
            )

    @property
    def sources(self) -> tuple[WeightedSource, ...]:
        """All sources with their weights, also where there is one."""
        if isinstance(self.source, str):
            return (WeightedSource(source=self.source),)
        return self.source

    def turns(self) -> tuple[int, ...]:
        """Windows of each source in the smallest cycle in which the weights come out exactly."""
        weights = [Fraction(str(share.weight)) for share in self.sources]
        whole = math.lcm(*(weight.denominator for weight in weights))
        counts = [int(weight * whole) for weight in weights]
        return tuple(count // math.gcd(*counts) for count in counts)

    def anchored(self, folder: Path) -> "DataConfig":
        """The same, with files named from `folder` on, so that it holds in any folder."""
        source, tokenizer = self.source, self.tokenizer
        if isinstance(source, str):
            source = anchored_spec(source, folder)
        else:
            source = tuple(
                dataclasses.replace(share, source=anchored_spec(share.source, folder))
                for share in source
            )
        if tokenizer is not None and not tokenizer.startswith(HUB):
            tokenizer = str(folder / os.path.expanduser(tokenizer))
        return dataclasses.replace(self, source=source, tokenizer=tokenizer)

    def stages(self, steps: int) -> tuple[BatchStage, ...]:
        """The parts of a run of `steps` steps in order, each with the shape of its batches."""
        whole = LengthStage(fraction=1.0, length=self.sequence_length)
        parts = self.sequence_lengths or (whole,)
        if self.recall is not None:
            parts = self.recall.curriculum
        ends = [0, *stage_ends([part.fraction for part in parts], steps)]
        return tuple(
            BatchStage(steps=end - start, rows=self._rows_of(part.length), length=part.length)
            for (start, end), part in zip(itertools.pairwise(ends), parts, strict=True)
        )

    def _rows_of(self, length: int) -> int:
        """Rows of a batch whose rows have `length` tokens: text keeps its tokens, recall rows."""
        if self.recall is not None:
            return self.batch_size
        return self.batch_size * self.sequence_length // length

    @property
    def isolated(self) -> bool:
        """Whether a document sees only itself."""
        return self.pack != "stream"

    def padded(self, vocab_size: int) -> int:
        """A vocabulary rounded up to a multiple of `pad_vocab_to`."""
        return -(-vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    def model_vocab_size(self) -> int | None:
        """The model's vocabulary, padded; None where only the named tokenizer tells.

        A BPE trained on very little text may turn out smaller, and the model with it.
        """
        tokens = self.vocab_size if self.recall is None else self.recall.vocab_size
        return None if tokens is None else self.padded(tokens)
