"""Words for keys and for lists of words: built in, from a file, or those of `wonderwords`."""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import overload

from meanbank.evaluation.ruler.vocabulary import ADJECTIVES, NOUNS, VERBS, made_up

WONDERWORDS = "wonderwords"
LEAST = 50  # the example of common words takes 40


class Pairs(Sequence[str]):
    """All `adjective-noun`, sorted and each once, without a list of them: there are millions."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self.nouns = sorted(set(nouns))
        self.blocks: list[list[str]] = []  # adjectives whose pairs stand together
        for adjective in sorted(set(adjectives), key=lambda word: word + "-"):
            if self.blocks and adjective.startswith(self.blocks[-1][0] + "-"):
                self.blocks[-1].append(adjective)  # `old-fashioned` falls among the `old-...`
            else:
                self.blocks.append([adjective])
        sizes = (
            len(self.nouns if len(block) == 1 else self._mixed(number))
            for number, block in enumerate(self.blocks)
        )
        self.starts = [0, *itertools.accumulate(sizes)]

    @functools.cache  # noqa: B019  (as long-lived as the pairs)
    def _mixed(self, number: int) -> list[str]:
        return sorted({f"{word}-{noun}" for word in self.blocks[number] for noun in self.nouns})

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.starts, index) - 1
        place, block = index - self.starts[number], self.blocks[number]
        if len(block) == 1:
            return f"{block[0]}-{self.nouns[place]}"
        return self._mixed(number)[place]


class Words:
    """keys: to choose keys from. listed(least): words for lists, sorted.

    `least` is how many a list may need: what is built in goes on for as long as that.
    """

    def __init__(
        self, name: str, sha256: str, keys: Sequence[str], listed: Callable[[int], list[str]]
    ) -> None:
        self.name, self.sha256, self.keys, self.listed = name, sha256, keys, listed


def open_words(setting: str | None) -> Words:
    """None: built in. `wonderwords`: that package's. Else a file with one word a line.

    Raises ValueError, in one line, where there is no such file or package, or too few words.
    """
    if setting is None:
        return _built_in()
    if setting == WONDERWORDS:
        return _wonderwords()
    return _from_file(Path(setting).expanduser())


def _built_in() -> Words:
    real = sorted({*ADJECTIVES, *NOUNS, *VERBS})
    sha256 = _sha256([*ADJECTIVES, *NOUNS, *VERBS, *made_up(1000, real)])

    def listed(least: int) -> list[str]:
        return sorted([*real, *made_up(least - len(real), real)])

    return Words("built in", sha256, Pairs(ADJECTIVES, NOUNS), listed)


def _wonderwords() -> Words:
    try:
        import wonderwords  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "words: wonderwords needs that package: pip install wonderwords; or name a file"
        ) from None
    categories = wonderwords.RandomWord()._categories
    nouns, adjectives, verbs = (categories[name] for name in ("noun", "adjective", "verb"))
    listed = sorted({*nouns, *adjectives, *verbs})
    return Words(WONDERWORDS, _sha256(listed), Pairs(adjectives, nouns), lambda least: listed)


def _from_file(path: Path) -> Words:
    try:
        words = sorted({line.strip() for line in path.read_text("utf-8").splitlines()} - {""})
    except OSError as error:
        raise ValueError(
            f"cannot read words from {path}: {error.strerror}; give a file with one word a line, "
            f"{WONDERWORDS}, or nothing for those built in"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    if len(words) < LEAST:
        raise ValueError(f"{path} has {len(words)} words; give at least {LEAST}, one a line")
    return Words(path.name, _sha256(words), words, lambda least: words)


def _sha256(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode("utf-8")).hexdigest()
