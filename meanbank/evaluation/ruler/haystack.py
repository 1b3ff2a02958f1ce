"""The text that needles are hidden in."""

import functools
import glob
import hashlib
import os
import random
import re
from typing import Literal

from meanbank.data import open_source
from meanbank.evaluation.ruler.vocabulary import ADJECTIVES, NOUNS, PAST, TIMES

Splitter = Literal["plain", "punkt"]

BUILT_IN_WORDS = 100_000
_END = re.compile(r"[.!?][\"')\]’”]*$")
_PATTERNS = (
    "The {a} {n} {v} the {n} beside the {m}.",
    "Nobody knew why the {n} had {v} a {a} {m} that day.",
    "When the {n} came back, the {a} {m} was already there.",
    "There was a {a} {n} in the {m}, and it stayed there all {t}.",
    "A {n} {v} the {m}, which was {a} and rather {b}.",
    "In the {t} the {n} seemed {a}, but the {m} did not mind.",
    "She asked the {n} about the {a} {m} and waited for an answer.",
    "He had never seen a {m} as {a} as the one near the {n}.",
    "Every {t} the {a} {n} {v} the same {m}.",
    "If the {m} is {a}, the {n} will have to be {b}.",
    "They carried the {n} past the {m} before the {a} {t} was over.",
    "Was it the {n} or the {m} that looked so {a}?",
    "Some said that the {a} {n} {v} the {m}; others were not so sure.",
    "It is easy to forget how {a} a {n} can be.",
)


class Haystack:
    """Words of running text, which begins again where it ends.

    splitter: how it is cut into sentences: `plain`, after a full stop, or by `punkt` of NLTK.
    """

    def __init__(self, name: str, text: str, splitter: Splitter) -> None:
        self.name = name
        self.words = re.sub(r"\s+", " ", text).split(" ")
        self.sha256 = hashlib.sha256(" ".join(self.words).encode("utf-8")).hexdigest()
        self._split = {"plain": plain_sentences, "punkt": punkt_sentences}[splitter]

    @functools.lru_cache(maxsize=4)  # noqa: B019  (as long-lived as the text)
    def sentences(self, words: int) -> tuple[str, ...]:
        """The first so many words as sentences, the last one perhaps cut."""
        repeats = -(-words // len(self.words))
        return tuple(self._split(" ".join((self.words * repeats)[:words]).strip()))


def plain_sentences(text: str) -> list[str]:
    """A sentence ends where a word ends in . ! or ? and the next one has no small letter first."""
    sentences, words = [], []
    for word in text.split(" "):
        if words and _END.search(words[-1]) and not word[:1].islower():
            sentences.append(" ".join(words))
            words = []
        words.append(word)
    return [*sentences, " ".join(words)]


def punkt_sentences(text: str) -> list[str]:
    """As NLTK cuts; ValueError where it or its data is missing."""
    try:
        from nltk import sent_tokenize  # pyright: ignore[reportMissingImports]

        return sent_tokenize(text)
    except ImportError:
        raise ValueError("sentences: punkt needs NLTK: pip install nltk") from None
    except LookupError:
        raise ValueError(
            "sentences: punkt needs NLTK's data: python -m nltk.downloader punkt_tab"
        ) from None


def open_haystack(setting: str | None, splitter: Splitter) -> Haystack:
    """None: built in. Else a folder, whose `.txt` files are read, or a glob of text files.

    Raises ValueError, in one line, where there are none or they hold no text.
    """
    if setting is None:
        return Haystack("built in", built_in_text(), splitter)
    folder = os.path.expanduser(setting)
    pattern = os.path.join(glob.escape(folder), "**/*.txt") if os.path.isdir(folder) else setting
    text = " ".join(document.text for document in open_source(f"files:{pattern}").documents())
    if not text.strip():
        raise ValueError(f"the haystack {setting} holds no text; name a folder or glob of texts")
    return Haystack(setting, text, splitter)


@functools.cache
def built_in_text() -> str:
    """Plain English sentences, the same each time, without figures or capitals but the first."""
    dice, sentences, words = random.Random(0), [], 0
    while words < BUILT_IN_WORDS:
        (a, b), (n, m) = dice.sample(ADJECTIVES, 2), dice.sample(NOUNS, 2)
        sentences.append(
            dice.choice(_PATTERNS).format(
                a=a, b=b, n=n, m=m, v=dice.choice(PAST), t=dice.choice(TIMES)
            )
        )
        words += sentences[-1].count(" ") + 1
    return " ".join(sentences)
