"""The three kinds of CORE tasks: what an item is, and the rows of tokens that it is judged by.

Prompts are built as nanochat builds them: answered examples and the question, a blank line between
them, tokenized as one text.
"""

import abc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from meanbank.evaluation.continuations import Continuation

Item = dict[str, Any]
Encode = Callable[[str], list[int]]


class Kind(abc.ABC):
    """options: the name of the list that `gold` points into; None where there is one answer.

    texts: names of the other fields, all of them text.
    """

    options: ClassVar[str | None] = None
    texts: ClassVar[tuple[str, ...]]

    def check(self, item: Any) -> None:
        """Raises ValueError unless `item` is an item of this kind."""
        if not isinstance(item, dict):
            raise ValueError("expected an object")
        for name in self.texts:
            if not isinstance(item.get(name), str):
                raise ValueError(f"{name!r} must be text, got {item.get(name)!r:.60}")
        if self.options is None:
            return
        options, gold = item.get(self.options), item.get("gold")
        listed = isinstance(options, list) and all(isinstance(option, str) for option in options)
        if not (listed and options and len(options) > 1):
            raise ValueError(
                f"{self.options!r} must be a list of two texts or more, got {options!r:.60}"
            )
        if type(gold) is not int or not 0 <= gold < len(options):
            raise ValueError(f"'gold' must be from 0 to {len(options) - 1}, got {gold!r:.60}")

    def chance(self, item: Item) -> float:
        """The share of right answers of one who picks an option blindly."""
        return 0.0 if self.options is None else 1 / len(item[self.options])

    def prompts(self, item: Item, examples: Sequence[Item], delimiter: str) -> list[str]:
        """The whole text for each option: answered examples, the question, and the option."""
        head = self._head(examples, delimiter)
        return [head + text for text in self.answered(item, delimiter)]

    @abc.abstractmethod
    def answered(self, item: Item, delimiter: str) -> list[str]:
        """The question with each of its answers."""

    @abc.abstractmethod
    def rows(
        self, encode: Encode, item: Item, examples: Sequence[Item], delimiter: str
    ) -> list[Continuation]:
        """One row an option; what is judged of it depends on the kind."""

    def _head(self, examples: Sequence[Item], delimiter: str) -> str:
        right = [0 if self.options is None else item["gold"] for item in examples]
        texts = (self.answered(item, delimiter) for item in examples)
        return "".join(f"{text[gold]}\n\n" for text, gold in zip(texts, right, strict=True))


class MultipleChoice(Kind):
    """One question, several answers: what is judged begins where the rows first differ."""

    options, texts = "choices", ("query",)

    def answered(self, item: Item, delimiter: str) -> list[str]:
        return [item["query"] + delimiter + choice for choice in item["choices"]]

    def rows(self, encode, item, examples, delimiter):
        rows = [encode(prompt) for prompt in self.prompts(item, examples, delimiter)]
        common = min((_common(a, b) for a, b in pairwise(rows)), default=1)
        # At least one token, for an answer that another one begins with.
        start = min(common, *(len(row) - 1 for row in rows))
        return [_row(row, start) for row in rows]


class Schema(Kind):
    """Several contexts, one continuation: what is judged are the last tokens that rows share."""

    options, texts = "context_options", ("continuation",)

    def answered(self, item: Item, delimiter: str) -> list[str]:
        return [context + delimiter + item["continuation"] for context in item["context_options"]]

    def rows(self, encode, item, examples, delimiter):
        rows = [encode(prompt) for prompt in self.prompts(item, examples, delimiter)]
        common = min((_common(a[::-1], b[::-1]) for a, b in pairwise(rows)), default=1)
        return [_row(row, len(row) - max(common, 1)) for row in rows]


class LanguageModeling(Kind):
    """One continuation, whose tokens all have to be the most likely ones."""

    texts = ("context", "continuation")

    def answered(self, item: Item, delimiter: str) -> list[str]:
        return [item["context"].strip() + delimiter + item["continuation"]]

    def rows(self, encode, item, examples, delimiter):
        (whole,) = (encode(prompt) for prompt in self.prompts(item, examples, delimiter))
        (without,) = self.prompts({**item, "continuation": ""}, examples, delimiter)
        # White space before the answer is part of its first token.
        return [_row(whole, _common(encode(without.rstrip()), whole))]


KINDS: dict[str, Kind] = {
    "multiple_choice": MultipleChoice(),
    "schema": Schema(),
    "language_modeling": LanguageModeling(),
}


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _row(ids: Sequence[int], start: int) -> Continuation:
    if len(ids) < 2:
        raise ValueError(f"a prompt of {len(ids)} tokens cannot be judged; give a prefix token")
    return Continuation(ids=tuple(ids), start=min(max(start, 1), len(ids) - 1))
