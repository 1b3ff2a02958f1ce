"""RULER: thirteen tasks that ask what a model finds in a long context."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from meanbank.core.config import check_least, choose
from meanbank.evaluation.base import Evaluation, Record, Sample, Subject, prompt_hash
from meanbank.evaluation.ruler.aggregation import CommonWords, FrequentWords
from meanbank.evaluation.ruler.answers import greedy_answers
from meanbank.evaluation.ruler.documents import (
    FORMATS,
    WANTED,
    Documents,
    Library,
    open_libraries,
)
from meanbank.evaluation.ruler.haystack import Haystack, Splitter, open_haystack
from meanbank.evaluation.ruler.niah import DEPTHS, NIAH, Niah
from meanbank.evaluation.ruler.scoring import any_found, averages, by_depth, rows, share_found
from meanbank.evaluation.ruler.task import Recipe, Task, Tokens
from meanbank.evaluation.ruler.tracking import Chains
from meanbank.evaluation.ruler.words import Words, open_words

WITHOUT_FILES = (*NIAH, "vt", "cwe", "fwe")
TASKS = (*WITHOUT_FILES, *FORMATS)
MOST_NEEDLES = max(needles.keys * needles.values for needles in NIAH.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruler(Evaluation, tag="ruler"):
    """RULER (Hsieh et al. 2024), its prompts those of lm_eval 0.4.13 for the same texts and seed.

    tasks: some of `TASKS`; by default all that need no file.
    lengths: of prompt and output together, in tokens of the subject.
    count: samples of each task and length, the first ones of any larger count.
    haystack: a folder or glob of text files that needles are hidden in; None: built in.
    sentences: how the haystack is cut into sentences: `plain`, or `punkt` as lm_eval does (NLTK).
    words: a file with one word a line, or `wonderwords`, which lm_eval takes; None: built in.
    documents: for `qa_1` a file in SQuAD's form, for `qa_2` one in HotpotQA's; a folder or glob
    for both. depths: where needles stand in a text, in percent; RULER's 40 by default.

    The output may take RULER's number of tokens. As in lm_eval, the words that the answer begins
    with are not counted, so prompt and output together can be a little longer.
    Not as lm_eval: keys are never the same by chance; `fwe` leaves room for its output; a length
    too short for lm_eval's smallest haystack gets a smaller one; a text that is too short begins
    again; qa is scored by any of the answers, as in RULER.
    """

    tasks: tuple[str, ...] = WITHOUT_FILES
    lengths: tuple[int, ...] = (4096,)
    count: int = 100
    seed: int = 0
    haystack: str | None = None
    sentences: Splitter = "plain"
    words: str | None = None
    documents: str | None = None
    depths: tuple[int, ...] = DEPTHS
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name in self.tasks:
            choose("task of RULER", name, TASKS)
        for name in ("tasks", "lengths", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be distinct and at least one, got {list(values)}")
        check_least(self, 1, "count", "lengths", "batch_size")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be at least 0 and below 2**32, got {self.seed}")
        if not 0 <= min(self.depths) <= max(self.depths) <= 100 or len(self.depths) < MOST_NEEDLES:
            raise ValueError(
                f"depths must be at least {MOST_NEEDLES} percentages from 0 to 100, "
                f"got {list(self.depths)}"
            )
        asking = [name for name in self.tasks if name in FORMATS]
        if asking and self.documents is None:
            raise ValueError(f"{' and '.join(asking)} need `documents`: {WANTED}")

    @property
    def batch(self) -> int:
        return self.batch_size

    def samples(self, subject: Subject) -> list[Sample]:
        def tokens(text: str) -> int:
            return len(subject.encode(text))

        subject.text_tokenizer()
        return [
            Sample(
                id=f"{recipe.task}@{recipe.length}/{recipe.index}",
                content=recipe,
                group=f"{recipe.task}@{recipe.length}",
                size=recipe.length,
            )
            for length in self.lengths
            for name in self.tasks
            for recipe in self._recipes(name, length, tokens)
        ]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        recipes: list[Recipe] = [sample.content for sample in samples]
        tasks = [self.task(recipe.task, recipe.length) for recipe in recipes]
        drafts = [task.made(recipe) for task, recipe in zip(tasks, recipes, strict=True)]
        prompts = [
            subject.encode(task.prompt(draft)) for task, draft in zip(tasks, drafts, strict=True)
        ]
        answers = greedy_answers(subject.model, prompts, [task.output_tokens for task in tasks])
        records = []
        for task, recipe, draft, prompt, answer in zip(
            tasks, recipes, drafts, prompts, answers, strict=True
        ):
            output = subject.text_tokenizer().decode(answer, skip_special_tokens=True)
            score = (any_found if task.best_reference else share_found)(output, draft.references)
            records.append(
                {
                    "prompt": prompt_hash(prompt),
                    "task": recipe.task,
                    "length": recipe.length,
                    "tokens": len(prompt),
                    "depth": draft.depth,
                    "output": output,
                    "references": list(draft.references),
                    "scores": {f"{self.title}:{recipe.task}@{recipe.length}": score},
                }
            )
        return records

    def results(self, subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
        table = rows(records)
        return {
            "rows": table,
            "average": averages(table),
            "depths": by_depth(records),
            "seed": self.seed,
            "bos_policy": subject.bos_policy,
            **self.inputs(),
        }

    def inputs(self) -> dict[str, Any]:
        return {
            "haystack": _origin(self._haystack) | {"sentences": self.sentences},
            "words": _origin(self._words),
            "documents": {name: _origin(library) for name, library in self._libraries.items()},
        }

    def prompt_lengths(self, subject: Subject) -> tuple[int, ...]:
        return self.lengths

    def scores(self, results: dict[str, Any]) -> dict[str, float]:
        each = {
            f"{self.title}:{row['task']}@{row['length']}": row["score"] for row in results["rows"]
        }
        return each | {f"{self.title}@{row['length']}": row["score"] for row in results["average"]}

    def task(self, name: str, length: int) -> Task:
        """One of the tasks, with what it is made of; ValueError where a file does not do."""
        if name in NIAH:
            return Niah(name, NIAH[name], self._words, self._haystack, self.depths)
        if name in FORMATS:
            if name not in self._libraries:
                raise ValueError(f"{name} needs documents in the form of {FORMATS[name]}: {WANTED}")
            return Documents(name, self._libraries[name])
        if name == "cwe":
            return self._common_words(length)
        return Chains() if name == "vt" else FrequentWords()

    def _recipes(self, name: str, length: int, tokens: Tokens) -> list[Recipe]:
        task = self.task(name, length)
        recipes = list(task.recipes(length, self.count, self.seed, tokens))
        if not recipes:
            raise ValueError(
                f"no sample of {name} fits {length} tokens, {task.output_tokens} of them for the "
                "output; give a longer one of `lengths`"
            )
        return recipes

    @functools.cached_property
    def _haystack(self) -> Haystack:
        return open_haystack(self.haystack, self.sentences)

    @functools.cached_property
    def _words(self) -> Words:
        return open_words(self.words)

    @functools.cached_property
    def _libraries(self) -> dict[str, Library]:
        return {} if self.documents is None else open_libraries(self.documents)

    @functools.cache  # noqa: B019  (as long-lived as the settings)
    def _common_words(self, length: int) -> CommonWords:
        return CommonWords(self._words, length)


def _origin(text: Haystack | Words | Library) -> dict[str, str]:
    return {"name": text.name, "sha256": text.sha256}
