"""A tokenizer for RULER's texts, and questions in the two forms of documents."""

import functools
import string

from tokenizers import Tokenizer

from meanbank.data import train_tokenizer
from meanbank.evaluation.ruler.haystack import built_in_text


@functools.cache
def ruler_tokenizer() -> Tokenizer:
    """About as coarse as a large model's: figures and hexadecimal digits in twos and threes."""
    numbers = " ".join(str(7919 * n % 10**7) for n in range(20_000))
    capitals = string.ascii_uppercase
    letters = " ".join(f"{a}{b} VAR {b}{a}{b}" for a in capitals for b in capitals)
    templates = "One of the special magic numbers for old-lamp is: hidden within following text. "
    texts = [built_in_text()[:100_000], numbers, letters * 9, templates * 50]
    return train_tokenizer(texts, 3000)


def squad(articles: int = 4, paragraphs: int = 6) -> dict:
    def paragraph(article: int, number: int) -> dict:
        text = f"Article {article}, part {number}. " + f"Town {article} has {number} bridges. " * 5
        asked = {"question": f"How many bridges has town {article} in part {number}?"}
        right = [{"text": f"{number} bridges"}, {"text": f"has {number} bridges"}]
        return {
            "context": text,
            "qas": [
                asked | {"answers": right, "is_impossible": False},
                asked | {"answers": [], "is_impossible": True},
            ],
        }

    return {
        "data": [
            {"paragraphs": [paragraph(a, p) for p in range(paragraphs)]} for a in range(articles)
        ]
    }


def hotpot(entries: int = 12) -> list[dict]:
    return [
        {
            "question": f"Who lives beside person {number}?",
            "answer": f"person {number + 1}",
            "context": [
                [f"Street {number}", [f"Person {number} lives here.", " So do others." * 9]],
                [f"Avenue {number}", [f"Beside person {number} lives person {number + 1}."]],
            ],
        }
        for number in range(entries)
    ]
