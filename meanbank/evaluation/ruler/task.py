"""What a task of RULER is, and how its samples are made to fit a length.

Random numbers are drawn in the order of lm_eval's generators (0.4.13, `lm_eval/tasks/ruler`), so
samples equal theirs after `random.seed(seed)` and `numpy.random.seed(seed)`.
"""

import abc
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

Tokens = Callable[[str], int]  # how many tokens a text has

ORDER_SEED = 42  # RULER's, of what it shuffles the same way each time
RUNAWAY = 16  # units of size for each token of the length: no tokenizer is that coarse


class Dice:
    """The streams of random numbers of a task: Python's, NumPy's, and one for orders."""

    def __init__(self, seed: int) -> None:
        self.random, self.order = random.Random(seed), random.Random(ORDER_SEED)
        self.numbers = np.random.RandomState(seed)

    def state(self) -> tuple[Any, ...]:
        """Where the streams are, in a few kilobytes."""
        streams = (np.array(d.getstate()[1], np.uint32) for d in (self.random, self.order))
        return (*streams, self.numbers.get_state())

    def go_to(self, state: tuple[Any, ...]) -> None:
        for stream, at in zip((self.random, self.order), state, strict=False):
            stream.setstate((3, tuple(at.tolist()), None))
        self.numbers.set_state(state[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A sample's texts.

    text: the question with what it is about. lead: how the answer begins. measured: what has to
    fit, beside the output. growing: what has to fit while the size is being found. depth: of the
    first needle asked for, in percent of the haystack.
    """

    text: str
    lead: str
    measured: str
    growing: str
    references: tuple[str, ...]
    depth: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a sample is made of again. size: of its haystack, in units of the task.

    state: of the dice before it. example: a solved one that its prompt begins with.
    """

    task: str
    length: int
    index: int
    size: int
    state: tuple[Any, ...]
    example: str = ""


class Task(abc.ABC):
    """A task; `size` is in units of its own, such as words, lines or documents.

    output_tokens: most that are generated. delimiter: between question and lead.
    best_reference: the score is 1 for any one of the references, else the share of them.
    """

    name: str
    output_tokens: int
    delimiter = " "
    best_reference = False
    least = 1  # the smallest size
    most: int | None = None  # the largest, where there is one

    @abc.abstractmethod
    def steps(self, length: int) -> tuple[int, ...]:
        """Sizes are multiples of the first of these of which one fits."""

    @abc.abstractmethod
    def draw(self, dice: Dice, size: int, length: int, index: int) -> Callable[[], Draft]:
        """Draw what is random; the call writes the texts."""

    def tries(self, size: int, step: int, index: int) -> Iterable[int]:
        """Sizes for a sample, until one fits."""
        return range(size, self.least - 1, -step)

    def prepare(self, dice: Dice, tokens: Tokens) -> str:
        """What is drawn before anything else; returns the example that prompts begin with."""
        return ""

    def with_example(self, dice: Dice, text: str, example: str) -> str:
        """The text behind the example."""
        return text

    def recipes(self, length: int, count: int, seed: int, tokens: Tokens) -> Iterator[Recipe]:
        """Samples that fit; one for which no size does is left out."""
        dice = Dice(seed)
        example = self.prepare(dice, tokens)
        room = length - self.output_tokens - (tokens(example) if example else 0)
        size, step = grown_size(self, dice, length, room, tokens)
        for index in range(count):
            for used in self.tries(size, step, index):
                state = dice.state()
                draft = self.draw(dice, used, length, index)()
                if tokens(draft.measured) <= room:
                    self.with_example(dice, draft.text, example)  # draws, too
                    yield Recipe(
                        task=self.name, length=length, index=index, size=used, state=state,
                        example=example,
                    )  # fmt: skip
                    break

    def made(self, recipe: Recipe) -> Draft:
        """The sample of a recipe."""
        dice = Dice(0)
        dice.go_to(recipe.state)
        draft = self.draw(dice, recipe.size, recipe.length, recipe.index)()
        text = self.with_example(dice, draft.text, recipe.example)
        return dataclasses.replace(draft, text=text)

    def prompt(self, draft: Draft) -> str:
        """What the model reads."""
        return draft.text + self.delimiter + draft.lead


def grown_size(task: Task, dice: Dice, length: int, room: int, tokens: Tokens) -> tuple[int, int]:
    """The size at which samples of `room` tokens begin to be tried, and the step down from it."""
    before, step = dice.state(), 1
    for step in task.steps(length):
        dice.go_to(before)
        size = _grow(task, dice, length, room, step, tokens)
        if size is not None:
            return size, step
    return task.least, step


def _grow(task: Task, dice: Dice, length: int, room: int, step: int, tokens: Tokens) -> int | None:
    """Grow by `step` until there is no room; None where the first one has none.

    lm_eval measures every size on the way. Here all are drawn, so that the dice end where its do,
    but only those of a binary search are measured.
    """
    first = max(step, task.least)
    states = [dice.state()]  # before each size, and after the last

    def size(number: int) -> int:
        return first + number * step

    def draw(number: int) -> Callable[[], Draft]:
        dice.go_to(states[number])
        return task.draw(dice, size(number), length, 0)

    @functools.cache
    def measured(number: int) -> int:
        while len(states) <= number + 1:
            draw(len(states) - 1)
            states.append(dice.state())
        return tokens(draw(number)().growing)

    end = None if task.most is None else max(0, (task.most - first) // step)
    full = first_full(lambda number: measured(number) >= room, end, RUNAWAY * length // step + 1)
    if full is None:
        assert end is not None and task.most is not None
        dice.go_to(states[end + 1])
        return task.most
    found = size(full) - step if measured(full) > room else size(full) + step
    dice.go_to(states[full + 1])
    return None if full == 0 and found < first else min(found, task.most or found)


def first_full(full: Callable[[int], bool], end: int | None, runaway: int) -> int | None:
    """The first number of which `full` holds, as of all after it; None if of none up to `end`."""
    low, high = -1, 0  # not full, to be tried
    while not full(high):
        if high == end:
            return None
        if high > runaway:
            raise ValueError("the tokenizer makes next to no tokens of the text; check it")
        low, high = high, 2 * high + 1 if end is None else min(2 * high + 1, end)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if full(middle) else (middle, high)
    return high
