"""Text and synthetic data: sources, tokenizer, packed splits, and batches for training."""

from meanbank.data.batches import IGNORED, Batch, TextBatches
from meanbank.data.config import DataConfig, WeightedSource
from meanbank.data.mqar import MqarConfig, mqar_batch
from meanbank.data.packed import PackedTokens, ShardedTokens
from meanbank.data.prepare import Corpus, Part, prepare_corpus
from meanbank.data.readers import Document
from meanbank.data.recall import Filler, RecallBatches, RecallConfig, Stage, recall_batch
from meanbank.data.sources import Source, open_source
from meanbank.data.stages import BatchStage, LengthStage
from meanbank.data.tokenizer import end_of_text_id, load_tokenizer, token_bytes, train_tokenizer
from meanbank.data.windows import Pack
from meanbank.data.writer import PackedWriter

__all__ = [
    "IGNORED",
    "Batch",
    "BatchStage",
    "Corpus",
    "DataConfig",
    "Document",
    "Filler",
    "LengthStage",
    "MqarConfig",
    "Pack",
    "PackedTokens",
    "PackedWriter",
    "Part",
    "RecallBatches",
    "RecallConfig",
    "ShardedTokens",
    "Source",
    "Stage",
    "TextBatches",
    "WeightedSource",
    "end_of_text_id",
    "load_tokenizer",
    "mqar_batch",
    "open_source",
    "prepare_corpus",
    "recall_batch",
    "token_bytes",
    "train_tokenizer",
]
