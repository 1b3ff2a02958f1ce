"""Questions about documents (`qa_1`: SQuAD, `qa_2`: HotpotQA), from files of either."""

import dataclasses
import glob
import hashlib
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from meanbank.core.files import read_json
from meanbank.evaluation.ruler.task import ORDER_SEED, Dice, Draft, Task

QUESTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {question}"
)
FORMATS = {"qa_1": "SQuAD", "qa_2": "HotpotQA"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """gold: the documents that hold the answer. near: others from the same place, taken next."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """Documents, sorted, and questions about them. name, sha256: of the file."""

    name: str
    sha256: str
    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


class Documents(Task):
    """Sizes are documents."""

    output_tokens = 32
    best_reference = True

    def __init__(self, name: str, library: Library) -> None:
        self.name, self.source, self.most = name, library, len(library.documents)

    def steps(self, length: int) -> tuple[int, ...]:
        return (10, 1)

    def tries(self, size: int, step: int, index: int) -> Iterable[int]:
        """Down to the documents that hold the answer; nothing for a question that is not there."""
        if index >= len(self.source.questions):
            return ()
        gold = len(self.source.questions[index].gold)
        return (*range(max(size, gold), gold, -step), gold)

    def draw(self, dice: Dice, size: int, length: int, index: int) -> Callable[[], Draft]:
        library, asked = self.source, self.source.questions[index]
        chosen = list(asked.gold)
        more = max(0, size - len(chosen))
        if size >= len(library.documents):
            chosen = list(range(len(library.documents)))
        elif more > len(asked.near):
            near = {*asked.gold, *asked.near}
            far = [i for i in range(len(library.documents)) if i not in near]
            chosen += [*asked.near, *dice.random.sample(far, more - len(asked.near))]
        else:
            chosen += dice.random.sample(asked.near, more)
        random.Random(ORDER_SEED).shuffle(chosen)
        return lambda: _written(asked, [library.documents[i] for i in chosen])


def _written(asked: Asked, documents: list[str]) -> Draft:
    numbered = (f"Document {n}:\n{text}" for n, text in enumerate(documents, start=1))
    text = QUESTION.format(context="\n\n".join(numbered), question=asked.question)
    return Draft(
        text=text,
        lead="Answer:",
        measured=text,
        growing=f"{text} {list(asked.answers)}",
        references=asked.answers,
    )


def open_libraries(setting: str) -> dict[str, Library]:
    """By task, the files at `setting`: a file, a folder of `.json` files, or a glob.

    Raises ValueError where there are none, two of a kind, or one that is neither kind.
    """
    expanded = os.path.expanduser(setting)
    folder = os.path.isdir(expanded)
    pattern = os.path.join(glob.escape(expanded), "*.json") if folder else expanded
    paths = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(f"no documents at {setting}: {WANTED}")
    libraries: dict[str, Library] = {}
    for path in paths:
        task, library = _open(path)
        if task in libraries:
            raise ValueError(
                f"{path} and {libraries[task].name} are both {FORMATS[task]}; name one of them"
            )
        libraries[task] = library
    return libraries


WANTED = (
    "give SQuAD's dev-v2.0.json for qa_1, HotpotQA's hotpot_dev_distractor_v1.json for qa_2, "
    "or a folder with both"
)


def _open(path: Path) -> tuple[str, Library]:
    data = read_json(path)
    task, read = ("qa_1", _squad) if isinstance(data, dict) else ("qa_2", _hotpot)
    try:
        documents, questions = read(data)
    except (KeyError, TypeError, ValueError, AttributeError):
        questions, documents = [], []
    if not questions:
        raise ValueError(f"{path} holds no questions in the form of SQuAD or HotpotQA: {WANTED}")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return task, Library(
        name=path.name, sha256=sha256, documents=tuple(documents), questions=tuple(questions)
    )


def _squad(data: Any) -> tuple[list[str], list[Asked]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    numbers = {text: number for number, text in enumerate(documents)}
    questions = []
    for article in articles:
        here = [numbers[paragraph["context"]] for paragraph in article]
        for paragraph, gold in zip(article, here, strict=True):
            questions += [
                Asked(
                    question=question["question"],
                    answers=tuple(answer["text"] for answer in question["answers"]),
                    gold=(gold,),
                    near=tuple(number for number in here if number != gold),
                )
                for question in paragraph["qas"]
                if not question.get("is_impossible", False)
            ]
    return documents, questions


def _hotpot(data: Any) -> tuple[list[str], list[Asked]]:
    def text(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = sorted({text(*document) for entry in data for document in entry["context"]})
    numbers = {document: number for number, document in enumerate(documents)}
    return documents, [
        Asked(
            question=entry["question"],
            answers=(entry["answer"],),
            gold=tuple(numbers[text(*document)] for document in entry["context"]),
        )
        for entry in data
    ]
