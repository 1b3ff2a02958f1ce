"""Sources made up for tests."""

from collections.abc import Iterator
from typing import Any

from meanbank.data.readers import Document
from meanbank.data.sources import Source


class ListSource(Source):
    """Documents from a list of names, or of names and texts; `reads` counts what was asked for."""

    def __init__(self, documents: list[str] | dict[str, str]):
        named = documents if isinstance(documents, dict) else {d: f"text of {d}" for d in documents}
        self.texts = dict(named)
        self.reads = 0

    def documents(self) -> Iterator[Document]:
        for name, text in self.texts.items():
            self.reads += 1
            yield Document(name, text)

    def fingerprint(self) -> str:
        return "list"

    def describe(self) -> dict[str, Any]:
        return {"source": "list"}
