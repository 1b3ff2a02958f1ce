"""The contract of evaluations: what is evaluated, sample by sample, and what comes out."""

import abc
import dataclasses
import functools
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from meanbank.core.config import Tagged
from meanbank.data import Corpus, RecallConfig

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated: any causal language model of Hugging Face, and what belongs to it.

    name: for titles and file names. model: in evaluation mode, on its device.
    tokenizer: None where the model was not trained on text.
    training_length: tokens of a training sequence; None where nobody knows.
    open_corpus: prepares the texts it is evaluated on; None where it has none.
    isolated: whether documents of a window were kept apart in training.
    recall: the task it was trained on, for models of the recall source.
    prefix: token ids in front of every text, such as a begin-of-text token.
    change: what an evaluation has changed in the model, for its results.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer | None = None
    training_length: int | None = None
    open_corpus: Callable[[], Corpus] | None = None
    isolated: bool = False
    recall: RecallConfig | None = None
    prefix: tuple[int, ...] = ()
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The texts it is evaluated on; ValueError where it has none."""
        if self.open_corpus is None:
            raise ValueError(f"{self.name} has no texts to be evaluated on; name some with --data")
        return self.open_corpus()

    @property
    def bos_policy(self) -> str:
        """In words, for results."""
        if not self.prefix:
            return "none: texts are read as they are"
        return f"token ids {list(self.prefix)} before every text"

    def known_training_length(self, setting: str) -> int:
        """`training_length`; ValueError, which names the setting to give, where nobody knows it."""
        if self.training_length is None:
            raise ValueError(f"nothing tells the training length of {self.name}; set {setting}")
        return self.training_length

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError where there is none."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: what it was trained on is not text")
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, `prefix` first."""
        return [*self.prefix, *self.text_tokenizer().encode(text, add_special_tokens=False).ids]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A piece of work that is measured whole and kept as one record.

    id: the same each time for the same settings. content: what `measure` makes a prompt of; small,
    since all samples of an evaluation are in memory at once. group: only samples of one group share
    a batch. size: how much work it is beside the others, for progress.
    """

    id: str
    content: Any = None
    group: str = ""
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Tagged, kind="evaluation"):
    """Settings of one evaluation, and how it is done; a subclass with a `tag` is a task.

    name: of its result file and its scores; the tag where None.
    """

    name: str | None = None

    @property
    def title(self) -> str:
        """`name`, or the tag."""
        return self.name or self.tag

    @property
    def batch(self) -> int:
        """Samples that `measure` is given at once, at most."""
        return 1

    @property
    def alone(self) -> bool:
        """Whether it measures time, so that nothing else should run beside it."""
        return False

    def prepared(self, subject: Subject) -> Subject:
        """What is measured in the subject's place: `samples` and all that follow are given that."""
        return subject

    def inputs(self) -> dict[str, Any]:
        """What it reads besides the subject, such as files, so that a change of it shows: JSON."""
        return {}

    @abc.abstractmethod
    def samples(self, subject: Subject) -> Sequence[Sample]:
        """All samples, in order; ValueError where the task does not fit the subject."""

    @abc.abstractmethod
    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        """One record, of JSON values, for each sample.

        `prompt`: the `prompt_hash` of what the model was shown, where there is such a thing.
        `scores`: {name: value} where a score is the mean over samples of these values; names are
        those that `scores` gives.
        """

    @abc.abstractmethod
    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        """The result, JSON values, from the records of all samples in their order."""

    @abc.abstractmethod
    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        """The numbers of a result by name, `NAME` or `NAME@WHERE`: `bpb`, `recall@512/48`.

        NAME begins with `title`; WHERE is a length, `LENGTH/PAIRS` or the like. Claims of studies
        use these names: letters, digits, `.`, `_`, `-`, `:`, `/` and one `@`.
        """

    def prompt_lengths(self, subject: Subject) -> tuple[int, ...]:
        """Where scores are by length, the lengths in tokens; results tell what each costs."""
        return ()


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that not every generator of random numbers takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")


def prompt_hash(prompt: str | bytes | np.ndarray | Tensor | Sequence[int]) -> str:
    """The first 16 hexadecimal digits of the sha256 of a text, of bytes, or of token ids."""
    if isinstance(prompt, str):
        content = prompt.encode("utf-8", "surrogatepass")
    elif isinstance(prompt, bytes):
        content = prompt
    else:
        content = np.asarray(prompt, dtype="<i8").tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def mean_scores(records: Sequence[Record]) -> dict[str, float]:
    """The mean of each score over the records that have it, in order of first appearance."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.get("scores", {}).items():
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of a mean; None of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
