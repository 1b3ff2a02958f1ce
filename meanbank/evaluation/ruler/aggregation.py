"""Aggregation: the most common words of a list (`cwe`), of a coded text (`fwe`)."""

import functools
import random
import string
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meanbank.evaluation.ruler.task import ORDER_SEED, Dice, Draft, Recipe, Task, Tokens, first_full
from meanbank.evaluation.ruler.words import Words

COMMON = 10
LISTED = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
LISTED_LEAD = "Answer: The top 10 words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
CODED_LEAD = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
CODED_LETTERS = 6
ZETA_2 = np.pi**2 / 6


class CommonWords(Task):
    """Sizes are different words; ten of them come more often than the others."""

    name = "cwe"
    output_tokens = 120
    delimiter = "\n\n"
    least = COMMON

    def __init__(self, words: Words, length: int) -> None:
        listed = words.listed(length // 4 if length < 4096 else length // 10)
        self.order_after = random.Random(ORDER_SEED)
        self.order_after.shuffle(listed := list(listed))
        self.words, self.most = listed, len(listed)

    def steps(self, length: int) -> tuple[int, ...]:
        return (10, 1)

    def prepare(self, dice: Dice, tokens: Tokens) -> str:
        dice.order.setstate(self.order_after.getstate())
        return ""

    def draw(self, dice: Dice, size: int, length: int, index: int) -> Callable[[], Draft]:
        long = length >= 4096
        example = self._list(dice, 40, 10, 3) if long else self._list(dice, 20, 3, 1)
        words = self._list(dice, size, 30, 3) if long else self._list(dice, size, 6, 1)
        return lambda: _listed(example, words)

    def _list(
        self, dice: Dice, size: int, common: int, others: int
    ) -> tuple[list[str], Sequence[str]]:
        """A list of so many different words, and those that come `common` times."""
        chosen = dice.random.sample(self.words, size)
        words = chosen[:COMMON] * common + chosen[COMMON:] * others
        dice.order.shuffle(words)
        return words, chosen[:COMMON]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _listed(
    example: tuple[list[str], Sequence[str]], words: tuple[list[str], Sequence[str]]
) -> Draft:
    def solved(one: tuple[list[str], Sequence[str]]) -> tuple[str, str]:
        return LISTED.format(context=_numbered(one[0])), _numbered(one[1])

    (shown, shown_answer), (text, answer) = solved(example), solved(words)
    whole = f"{text} {LISTED_LEAD}"
    return Draft(
        text=text,
        lead=LISTED_LEAD,
        measured=whole,
        growing=f"{shown} {LISTED_LEAD}{shown_answer}\n{whole} {answer}",
        references=tuple(words[1]),
    )


class FrequentWords(Task):
    """Sizes are words of coded text, whose counts fall with the square of their rank.

    The prompt and the output fit the length together; lm_eval's prompt alone does, so that this is
    theirs for a length that is the output's tokens shorter.
    """

    name = "fwe"
    output_tokens = 50

    def steps(self, length: int) -> tuple[int, ...]:
        return (max(1, (length - self.output_tokens) // 32),)

    def draw(self, dice: Dice, size: int, length: int, index: int) -> Callable[[], Draft]:
        def name() -> str:
            return "".join(dice.random.choices(string.ascii_lowercase, k=CODED_LETTERS))

        count = max(4, (length - self.output_tokens) // 50)
        names = [name() for _ in range(count)]
        while len(set(names)) < count:
            names.append(name())
        names = sorted(set(names))
        random.Random(ORDER_SEED).shuffle(names)
        return functools.partial(_coded, ["...", *names[1:]], size)

    def recipes(self, length: int, count: int, seed: int, tokens: Tokens) -> Iterator[Recipe]:
        """As for any task, but the same words are tried at all sizes."""
        dice, room, (step,) = Dice(seed), length - self.output_tokens, self.steps(length)

        def used(state: tuple, size: int) -> int:
            dice.go_to(state)
            return tokens(self.draw(dice, size, length, 0)().measured)

        first, state = room // CODED_LETTERS, dice.state()
        full = first_full(lambda number: used(state, first + number * step) >= room, None, room)
        most = first + ((full or 0) - 1) * step
        self._pass(dice, state, length)
        for index in range(count):
            state = dice.state()
            for size in range(most, 0, -step):
                if used(state, size) <= room:
                    yield Recipe(task=self.name, length=length, index=index, size=size, state=state)
                    break
            self._pass(dice, state, length)

    def _pass(self, dice: Dice, state: tuple, length: int) -> None:
        """Leave the dice as they are after one sample from `state`."""
        dice.go_to(state)
        self.draw(dice, 1, length, 0)


def _coded(names: list[str], size: int) -> Draft:
    ranks = np.arange(1, len(names) + 1)
    counts = (size * (ranks**-2.0) / ZETA_2).astype(int)
    words = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    random.Random(ORDER_SEED).shuffle(words)
    text = CODED.format(context=" ".join(words))
    whole = f"{text} {CODED_LEAD}"
    return Draft(
        text=text, lead=CODED_LEAD, measured=whole, growing=whole, references=tuple(names[1:4])
    )
