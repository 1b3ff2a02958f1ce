"""Needles in a haystack: eight tasks that differ in what is hidden, where, and how often."""

import dataclasses
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from meanbank.evaluation.ruler.haystack import Haystack
from meanbank.evaluation.ruler.task import ORDER_SEED, Dice, Draft, Task
from meanbank.evaluation.ruler.words import Words

Kind = Literal["words", "numbers", "uuids"]
Among = Literal["noise", "text", "needles"]

DEPTHS = tuple(round(100 * i / 39) for i in range(40))
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needles:
    """among: what they are hidden in. asked: how many keys the question is about."""

    among: Among
    keys: int = 1
    values: int = 1  # of each key
    asked: int = 1
    key: Kind = "words"
    value: Kind = "numbers"


NIAH = {
    "niah_single_1": Needles(among="noise"),
    "niah_single_2": Needles(among="text"),
    "niah_single_3": Needles(among="text", value="uuids"),
    "niah_multikey_1": Needles(among="text", keys=4),
    "niah_multikey_2": Needles(among="needles"),
    "niah_multikey_3": Needles(among="needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles(among="text", values=4),
    "niah_multiquery": Needles(among="text", keys=4, asked=4),
}


class Niah(Task):
    output_tokens = 128

    def __init__(
        self,
        name: str,
        needles: Needles,
        words: Words,
        haystack: Haystack,
        depths: Sequence[int] = DEPTHS,
    ) -> None:
        self.name, self.needles, self.words = name, needles, words
        self.haystack, self.depths = haystack, depths
        self.least = needles.keys * needles.values

    def steps(self, length: int) -> tuple[int, ...]:
        if self.needles.among == "text":
            return (500, 25)  # words
        return (5, 1) if length < 4096 else (25, 5, 1)  # lines

    def draw(self, dice: Dice, size: int, length: int, index: int) -> Callable[[], Draft]:
        pairs = self._pairs(dice)
        needles = [
            NEEDLE.format(kind=self.needles.value, key=key, value=value)
            for key, values in pairs.items()
            for value in values
        ]
        random.Random(ORDER_SEED).shuffle(needles)
        if self.needles.among == "text":
            depths = sorted(dice.random.sample(self.depths, len(needles)))
            context = self._in_text(size, needles, depths)
        else:
            lines = self._lines(dice, size, pairs)
            places = sorted(dice.random.sample(range(size), len(needles)), reverse=True)
            depths = [self._nearest(100 * place / size) for place in reversed(places)]
            context = _in_lines(lines, needles, places)
            needles = needles[::-1]  # as they stand
        keys = list(pairs)
        asked = [keys[i] for i in dice.random.sample(range(len(keys)), self.needles.asked)]
        starts = tuple(NEEDLE.format(kind=self.needles.value, key=k, value="")[:-1] for k in asked)
        first = min(d for n, d in zip(needles, depths, strict=True) if n.startswith(starts))
        return lambda: self._written(context(), {key: pairs[key] for key in asked}, first)

    def _pairs(self, dice: Dice) -> dict[str, list[str]]:
        """The values of each key. Keys are distinct: lm_eval's may not be, once in a long while."""
        pairs: dict[str, list[str]] = {}
        for _ in range(self.needles.keys):
            key = self._new_key(dice, pairs)
            pairs[key] = [self._one(dice, self.needles.value) for _ in range(self.needles.values)]
        return pairs

    def _new_key(self, dice: Dice, taken: dict[str, list[str]]) -> str:
        while (key := self._one(dice, self.needles.key)) in taken:
            pass
        return key

    def _one(self, dice: Dice, kind: Kind) -> str:
        if kind == "words":
            return dice.random.choice(self.words.keys)
        if kind == "numbers":
            return str(dice.random.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=dice.random.getrandbits(128), version=4))

    def _lines(self, dice: Dice, size: int, pairs: dict[str, list[str]]) -> list[str]:
        """Lines to hide a needle between; other needles are of other keys."""
        if self.needles.among == "noise":
            return [NOISE] * size
        kind = self.needles.value
        return [
            NEEDLE.format(kind=kind, key=self._new_key(dice, pairs), value=self._one(dice, kind))
            for _ in range(size)
        ]

    def _in_text(self, size: int, needles: list[str], depths: list[int]) -> Callable[[], str]:
        def write() -> str:
            sentences = self.haystack.sentences(size)
            cuts = [0, *(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
            parts = [" ".join(sentences[cuts[0] : cuts[1]])]
            for needle, start, stop in zip(needles, cuts[1:], cuts[2:], strict=False):
                parts += [needle, " ".join(sentences[start:stop])]
            return " ".join(parts)

        return write

    def _nearest(self, depth: float) -> int:
        return min(self.depths, key=lambda listed: abs(listed - depth))

    def _written(self, context: str, answers: dict[str, list[str]], depth: int) -> Draft:
        kind, *keys = self.needles.value, *answers
        one = len(keys) * self.needles.values == 1
        kind = kind.removesuffix("s") if one else kind
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        text = (ONE if one else SEVERAL).format(kind=kind, context=context, query=query)
        references = tuple(value for values in answers.values() for value in values)
        verb = "is" if one else "are"
        return Draft(
            text=text,
            lead=f"The special magic {kind} for {query} mentioned in the provided text {verb}",
            measured=text,
            growing=text + " ".join(references),
            references=references,
            depth=depth,
        )


def _in_lines(lines: list[str], needles: list[str], places: list[int]) -> Callable[[], str]:
    def write() -> str:
        mixed = list(lines)
        for place, needle in zip(places, needles, strict=True):  # from the end: no place moves
            mixed.insert(place, needle)
        return "\n".join(mixed)

    return write
