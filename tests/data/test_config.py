"""The data configuration: every bad value is one clear line."""

import pytest

from meanbank.data.config import DataConfig
from meanbank.data.recall import RecallConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "nothing"}, "unknown data source"),
        ({"vocab_size": 256}, "data.vocab_size must be at least 257, got 256"),
        ({"vocab_size": 0, "tokenizer": "somewhere"}, "data.vocab_size must be at least 1, got 0"),
        ({"tokenizer": "hf:"}, "give a name after hf:"),
        ({"pad_vocab_to": 0}, "data.pad_vocab_to"),
        ({"held_out_fraction": 0.0}, "data.held_out_fraction"),
        ({"held_out_fraction": 1.0}, "data.held_out_fraction"),
        ({"split_seed": -1}, "data.split_seed"),
        ({"sequence_length": 0}, "data.sequence_length"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"recall": RecallConfig()}, "source 'recall' only"),
    ],
)
def test_bad_values(settings: dict, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        DataConfig(**settings)
    assert "\n" not in str(caught.value)


def test_recall_settings_belong_to_the_recall_source():
    assert DataConfig().recall is None
    assert DataConfig(source="recall").recall == RecallConfig()
    chosen = RecallConfig(queries=3)
    assert DataConfig(source="recall", recall=chosen).recall is chosen


@pytest.mark.parametrize(
    ("settings", "tokens", "expected"),
    [
        ({}, 4096, 4096),
        ({"vocab_size": 300}, 300, 300),
        ({"vocab_size": 300, "pad_vocab_to": 64}, 300, 320),
        ({"vocab_size": 320, "pad_vocab_to": 64}, 320, 320),
        ({"tokenizer": "hf:gpt2"}, None, None),
        ({"tokenizer": "hf:gpt2", "pad_vocab_to": 64}, None, None),
        ({"tokenizer": "hf:gpt2", "vocab_size": 50257, "pad_vocab_to": 64}, 50257, 50304),
        ({"source": "recall", "pad_vocab_to": 64}, 4096, 128),
    ],
)
def test_the_models_vocabulary(settings: dict, tokens: int | None, expected: int | None):
    config = DataConfig(**settings)
    assert config.vocab_size == tokens
    assert config.model_vocab_size() == expected
