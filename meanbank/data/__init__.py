"""Text and synthetic data: sources, tokenizer, packed splits, and batches for training."""

from meanbank.data.batches import IGNORED, Batch, TextBatches
from meanbank.data.config import DataConfig
from meanbank.data.mqar import MqarConfig, mqar_batch
from meanbank.data.packed import PackedTokens, PackedWriter
from meanbank.data.prepare import Corpus, prepare_corpus
from meanbank.data.recall import Filler, RecallBatches, RecallConfig, Stage, recall_batch
from meanbank.data.sources import Document, Source, open_source
from meanbank.data.tokenizer import end_of_text_id, load_tokenizer, token_bytes, train_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "Corpus",
    "DataConfig",
    "Document",
    "Filler",
    "MqarConfig",
    "PackedTokens",
    "PackedWriter",
    "RecallBatches",
    "RecallConfig",
    "Source",
    "Stage",
    "TextBatches",
    "end_of_text_id",
    "load_tokenizer",
    "mqar_batch",
    "open_source",
    "prepare_corpus",
    "recall_batch",
    "token_bytes",
    "train_tokenizer",
]
