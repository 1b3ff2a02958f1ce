"""Which documents are held out, and a sample of the others: by hash, whatever their order."""

import hashlib
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from meanbank.data.readers import Document

_BLOCK = 2**20  # characters


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which documents are held out: those whose draw, a hash of seed and name, is below `cut`.

    So a document keeps its side whatever the order and whatever is added to the corpus.
    """

    seed: int
    cut: float

    def draw(self, name: str) -> float:
        """A number in [0, 1) that depends on the seed and the document's name only."""
        return _draw(f"split:{self.seed}:{name}")

    def is_held_out(self, name: str) -> bool:
        """The side of a document."""
        return self.draw(name) < self.cut

    def settled(self, lowest: float, highest: float) -> "Split":
        """The split of documents with such draws: a side that is empty gets the nearest one."""
        if lowest >= self.cut:
            return replace(self, cut=float(np.nextafter(lowest, 1)))
        return replace(self, cut=min(self.cut, highest))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one reading of a source tells.

    `split`: with a document on each side. `bytes`: of text. `sample`: whole training documents, in
    hashed order.
    """

    split: Split
    bytes: int
    sample: list[str]


def survey(read: Callable[[], Iterable[Document]], split: Split, sample_bytes: int) -> Survey:
    """Reads all documents once (twice where a side of `split` would be empty).

    The sample has about `sample_bytes` in all, at least one document, chosen by hash.
    Raises ValueError when there are fewer than two documents.
    """
    lowest, highest, documents, total = 1.0, 0.0, 0, 0
    heap: list[tuple[float, str, str, int]] = []
    held = 0
    for document in read():
        draw, size = split.draw(document.name), text_bytes(document.text)
        lowest, highest = min(lowest, draw), max(highest, draw)
        documents, total = documents + 1, total + size
        if draw < split.cut:
            continue
        rank = -_draw(f"sample:{document.name}")
        heapq.heappush(heap, (rank, document.name, document.text, size))
        held += size
        # Drop the documents of the highest draw while the others are enough.
        while held - heap[0][3] >= sample_bytes:
            held -= heapq.heappop(heap)[3]
    check_documents(documents)
    settled = split.settled(lowest, highest)
    if settled != split:
        return survey(read, settled, sample_bytes)
    sample = [text for _, _, text, _ in sorted(heap, reverse=True)]
    return Survey(split=split, bytes=total, sample=sample)


def check_documents(documents: int, too_short: int = 0) -> None:
    """Raises ValueError unless there are two documents to split."""
    if documents < 2:
        left = f" ({too_short} are shorter than data.min_document_tokens)" if too_short else ""
        raise ValueError(
            f"the source has {documents} documents with text{left}, a split needs at least 2: add "
            "files, or cut the text into several documents"
        )


def text_bytes(text: str) -> int:
    """Bytes of a text in UTF-8, without a copy of all of it."""
    if text.isascii():
        return len(text)
    starts = range(0, len(text), _BLOCK)
    return sum(len(text[start : start + _BLOCK].encode("utf-8")) for start in starts)


def _draw(key: str) -> float:
    """A uniform number in [0, 1) from a hash of `key`."""
    # 53 bits: what a float holds, so the number stays below 1.
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
