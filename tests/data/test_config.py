"""The data configuration: every bad value is one clear line."""

import pytest

from meanbank.core.config import build, to_plain
from meanbank.data.config import DataConfig, WeightedSource
from meanbank.data.recall import RecallConfig


def mixed(*weights: float, name: str | None = None) -> tuple[WeightedSource, ...]:
    return tuple(
        WeightedSource(source=name or f"files:{number}", weight=weight)
        for number, weight in enumerate(weights)
    )


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
        ({"min_document_tokens": 1}, "data.min_document_tokens must be at least 2, got 1"),
        ({"max_documents": 1}, "data.max_documents must be at least 2, got 1"),
        ({"max_tokens": 0}, "data.max_tokens must be at least 1, got 0"),
        ({"source": ()}, "at least one source"),
        ({"source": mixed(1, 1, name="stdlib")}, "names 'stdlib' more than once"),
        ({"source": mixed(0.123456, 1)}, "at most 10000 are allowed: round them"),
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


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ((0.7, 0.3), (7, 3)),
        ((1, 1, 1), (1, 1, 1)),
        ((0.5, 0.25, 0.25), (2, 1, 1)),
        ((200.0, 100.0), (2, 1)),
        ((0.3333, 0.6667), (3333, 6667)),
        ((3.0,), (1,)),
    ],
)
def test_turns_are_the_smallest_that_give_the_weights(weights: tuple, turns: tuple):
    assert DataConfig(source=mixed(*weights)).turns() == turns


def test_sources_come_from_plain_settings():
    assert DataConfig().sources == (WeightedSource(source="stdlib"),)
    entries = [{"source": "stdlib", "weight": 0.7}, {"source": "hf:x", "weight": 0.3}]
    config = build(DataConfig, {"source": entries}, "data")
    assert config.turns() == (7, 3)
    assert build(DataConfig, to_plain(config)) == config
    assert build(DataConfig, to_plain(DataConfig())) == DataConfig()
    for entry, message in (
        ({"source": "web:x"}, "unknown data source 'web:x'"),
        ({"source": "recall"}, "cannot be mixed"),
        ({"source": "stdlib", "weight": 0}, "a weight must be positive, got 0"),
        ({"weight": 1}, "setting 'source' is required"),
    ):
        with pytest.raises(ValueError, match=message):
            build(DataConfig, {"source": [entry]}, "data")


def test_a_tokenizer_is_named_from_a_folder_on(tmp_path):
    for given, anchored in (
        (None, None),
        ("hf:gpt2", "hf:gpt2"),
        ("tok", f"{tmp_path}/tok"),
        ("/srv/tok", "/srv/tok"),
    ):
        vocabulary = {} if given is None else {"vocab_size": None}
        config = DataConfig(tokenizer=given, **vocabulary)
        assert config.anchored(tmp_path).tokenizer == anchored
