"""Variable tracking (`vt`): a chain of assignments in noise; which variables have the value?"""

import itertools
import string
from collections.abc import Callable
from typing import Literal

from meanbank.evaluation.ruler.niah import NOISE
from meanbank.evaluation.ruler.task import Dice, Draft, Task, Tokens, grown_size

HOPS = 4
EXAMPLE_LENGTH = 500
QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text."
    "\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
# "assgined" is RULER's.
LEAD = (
    "Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assgined the value {value}, they are:"
)


class Chains(Task):
    """Sizes are lines of noise. letters: of a variable's name."""

    name = "vt"
    output_tokens = 30

    def __init__(self, letters: Literal[3, 5] = 5, step: Literal[5, 10] = 10) -> None:
        self.letters, self.step = letters, step

    def steps(self, length: int) -> tuple[int, ...]:
        return (self.step, 1)

    def draw(self, dice: Dice, size: int, length: int, index: int) -> Callable[[], Draft]:
        names = [self._name(dice, self.letters) for _ in range(HOPS + 1)]
        while len(set(names)) <= HOPS:
            names = list(dict.fromkeys([*names, self._name(dice, self.letters)]))
        value = int(dice.numbers.randint(10000, 99999))
        sentences = _noise(size)
        places = sorted(dice.random.sample(range(len(sentences)), HOPS + 1))
        return lambda: _written(names, value, sentences, places)

    def _name(self, dice: Dice, letters: int) -> str:
        return "".join(dice.random.choices(string.ascii_uppercase, k=letters))

    def prepare(self, dice: Dice, tokens: Tokens) -> str:
        """A solved example of at most 500 tokens, or of a line of noise."""
        task = Chains(letters=3, step=5)
        room = EXAMPLE_LENGTH - self.output_tokens
        size, step = grown_size(task, dice, EXAMPLE_LENGTH, room, tokens)
        for used in task.tries(size, step, 0):
            draft = task.draw(dice, used, EXAMPLE_LENGTH, 0)()
            if tokens(draft.measured) <= room or used - step < task.least:
                return f"{draft.measured} {' '.join(draft.references)}\n\n"
        raise AssertionError("there is always a last try")

    def with_example(self, dice: Dice, text: str, example: str) -> str:
        """The variables of the example are others each time."""
        solved = example.index("they are: ") + len("they are: ")
        for name in example[solved:].split():
            example = example.replace(name, self._name(dice, len(name)))
        return f"{example}\n\n{text}"


def _noise(lines: int) -> list[str]:
    """Lines of noise; its sentences where the chain has no room between lines."""
    noise = [NOISE + "\n"] * lines
    if lines > HOPS + 1:
        return noise
    pieces = [piece for line in noise for piece in line.split(".")]
    return [piece + "." if piece.strip() else piece for piece in pieces]


def _written(names: list[str], value: int, noise: list[str], places: list[int]) -> Draft:
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
    sentences = list(noise)
    for moved, (place, assignment) in enumerate(zip(places, chain, strict=True)):
        sentences.insert(place + moved, assignment)
    context = " ".join(sentences).replace(". \n", ".\n")
    text = QUESTION.format(context=context, value=value)
    lead = LEAD.format(count=len(names), value=value)
    whole = f"{text} {lead} "
    return Draft(
        text=text, lead=lead, measured=whole, growing=f"{whole} {names}", references=tuple(names)
    )
