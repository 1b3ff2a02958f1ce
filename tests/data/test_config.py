"""The data configuration: every bad value is one clear line."""

import pytest

from meanbank.data.config import DataConfig
from meanbank.data.recall import RecallConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "nothing"}, "unknown data source"),
        ({"vocab_size": 256}, "data.vocab_size"),
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
