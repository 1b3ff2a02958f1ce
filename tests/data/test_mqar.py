"""Multi-query associative recall: what every sequence must be, and where queries lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanbank.data import IGNORED, MqarConfig, mqar_batch
from meanbank.data.mqar import gap_weights, query_distances


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.integers(1, 9),
    room=st.integers(0, 40),
    keys=st.integers(9, 30),
    values=st.integers(9, 30),
    fillers=st.integers(1, 5),
    power_a=st.floats(0.01, 2),
    fill=st.sampled_from(["random", "constant"]),
    seed=st.integers(0, 2**31),
)
def test_every_sequence(pairs, room, keys, values, fillers, power_a, fill, seed):
    config = MqarConfig(
        keys=keys, values=values, fillers=fillers, power_a=power_a, non_queries=fill
    )
    length = 4 * pairs + room
    batch = mqar_batch(generator(seed), 3, length, pairs, config)
    again = mqar_batch(generator(seed), 3, length, pairs, config)
    assert torch.equal(batch.input_ids, again.input_ids)
    distances = iter(query_distances(batch).tolist())
    for tokens, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        assert len(tokens) == len(labels) == length
        stored = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(stored) == len(set(stored.values())) == pairs
        assert all(key < keys <= value < keys + values for key, value in stored.items())
        assert labels[: 2 * pairs] == [IGNORED] * (2 * pairs)  # no query before the pairs
        asked = [at for at, label in enumerate(labels) if label != IGNORED]
        assert sorted(tokens[at] for at in asked) == sorted(stored)  # each key once
        for at in asked:
            assert labels[at] == stored[tokens[at]]
            assert (at - 2 * pairs) % 2 == 0
            assert next(distances) == at - tokens.index(tokens[at]) > 0
        rest = {tokens[at] for at in range(2 * pairs, length) if at not in asked}
        assert all(keys + values <= token < keys + values + fillers for token in rest)
        if fill == "constant":
            assert len(rest) <= 1


def test_weights_of_gaps():
    assert gap_weights(4, 1.0).tolist() == pytest.approx([0.25] * 4)
    # almost 1 / gap: 1, 1/2, 1/3 over their sum 11/6
    assert gap_weights(3, 1e-9).tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power_a):
    """The first pair's query: exactly that chance. The second one: given where the first lies."""
    pairs, places, rows = 2, 12, 40_000
    config = MqarConfig(keys=8, values=8, fillers=1, power_a=power_a)
    batch = mqar_batch(generator(), rows, 2 * pairs + 2 * places, pairs, config)
    at = [
        (batch.input_ids[:, 2 * pairs :] == batch.input_ids[:, [key]]).int().argmax(dim=1) // 2
        for key in (0, 2)
    ]
    p = [gap ** (power_a - 1) for gap in range(1, places + 1)]
    p = [weight / sum(p) for weight in p]
    second = [
        sum(p[first] * p[gap] / (1 - p[first]) for first in range(places) if first != gap)
        for gap in range(places)
    ]
    for found, expected in zip(at, (p, second), strict=True):
        counts = torch.bincount(found, minlength=places).tolist()
        for count, share in zip(counts, expected, strict=True):
            sigma = (rows * share * (1 - share)) ** 0.5
            assert abs(count - rows * share) < 4.5 * sigma


@pytest.mark.parametrize(
    ("length", "pairs", "message"),
    [
        (64, 9, r"from 1 to 8 pairs \(distinct keys and distinct values\), got 9"),
        (64, 0, r"from 1 to 8 pairs"),
        (15, 4, r"4 pairs and their queries take 16 tokens, got 15"),
    ],
)
def test_what_does_not_fit(length, pairs, message):
    config = MqarConfig(keys=10, values=8)
    with pytest.raises(ValueError, match=message):
        mqar_batch(generator(), 1, length, pairs, config)
    assert mqar_batch(generator(), 1, 16, 4, config).input_ids.shape == (1, 16)
    with pytest.raises(ValueError, match=r"mqar.power_a must be positive, got 0"):
        MqarConfig(power_a=0)
