"""Losses by position, from the losses of the step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meanbank.data import IGNORED, Batch
from meanbank.model import MeanbankForCausalLM
from meanbank.training import load_config, train
from meanbank.training.gradients import numbers_of
from meanbank.training.metrics import read_metrics
from meanbank.training.positions import PositionLosses, positions_of
from meanbank.training.trainer import language_loss
from tests.training.test_resume import figures, files_at


def batch_of(labels, documents=None) -> Batch:
    labels = torch.tensor(labels)
    documents = None if documents is None else torch.tensor(documents)
    return Batch(input_ids=torch.zeros_like(labels), labels=labels, document_ids=documents)


def test_means_by_hand():
    """The right token has probability p, so the loss is -log p."""
    labels = [[0, 1, 1, IGNORED, 0], [1, IGNORED, IGNORED, IGNORED, IGNORED]]
    chance = torch.tensor([[0.5, 0.25, 0.5, 0.1, 0.2], [0.125, 0.1, 0.1, 0.1, 0.1]])
    losses = PositionLosses()
    losses.add(-chance.log(), batch_of(labels))
    two = math.log(2)
    assert losses.counts.tolist() == [3, 1, 1]
    assert losses.sums.tolist() == pytest.approx([(1 + 2 + 3) * two, two, math.log(5)])
    means = losses.means()
    assert list(means) == ["loss_at/0-1", "loss_at/2-3", "loss_at/4-7"]
    assert list(means.values()) == pytest.approx([2 * two, two, math.log(5)])


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_each_target_is_counted_once_in_its_bucket(length: int, rows: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(7, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = IGNORED
    losses = torch.rand(rows, length, generator=generator)
    whole, parts = PositionLosses(), PositionLosses()
    whole.add(losses, batch_of(labels.tolist()))
    for row in range(rows):  # as ranks or accumulated parts have them
        parts.add(losses[row : row + 1], batch_of(labels[row : row + 1].tolist()))
    assert torch.equal(whole.counts, parts.counts)
    torch.testing.assert_close(whole.sums, parts.sums)
    expected: dict[str, list[float]] = {}
    for row in range(rows):
        for place in range(length):
            if labels[row, place] != IGNORED:
                low = max(place.bit_length() - 1, 0)
                name = f"loss_at/{2**low if low else 0}-{2 ** (low + 1) - 1}"
                expected.setdefault(name, []).append(losses[row, place].item())
    means = whole.means()
    assert set(means) == set(expected)
    for name, values in expected.items():
        assert means[name] == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_positions_count_from_the_beginning_of_what_is_seen():
    labels = [[1] * 7, [1] * 7]
    rows = batch_of(labels)
    assert positions_of(rows).tolist() == [[0, 1, 2, 3, 4, 5, 6]] * 2
    kept_apart = batch_of(labels, [[0, 0, 1, 1, 1, 2, 3], [4, 4, 4, 4, 4, 4, 4]])
    assert positions_of(kept_apart).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]


def test_loss_and_gradient_are_the_same_bits(config_file):
    model = MeanbankForCausalLM(load_config(config_file).model_config(300))
    ids, labels = torch.randint(300, (2, 2, 32))
    batch, found = Batch(input_ids=ids, labels=labels), []
    losses = PositionLosses()
    for positions in (None, losses):
        model.zero_grad()
        loss = language_loss(model, batch, batch.targets, positions)
        loss.backward()
        found.append([loss.detach(), *(g.clone() for g in numbers_of(model).values())])
    assert len(found[0]) > 10
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert losses.sums.sum() / losses.counts.sum() == pytest.approx(loss.item(), rel=1e-5)


def test_a_run_logs_them_and_learns_the_same(config_file, tmp_path):
    plain = train(load_config(config_file), tmp_path / "plain")
    settings = ["training.position_loss_every=2", "training.accumulation=2"]
    logged = train(load_config(config_file, settings[:1]), tmp_path / "logged")
    parts = train(load_config(config_file, settings), tmp_path / "parts")
    assert files_at(logged) == files_at(plain)
    names = [f"loss_at/{where}" for where in ("0-1", "2-3", "4-7", "8-15", "16-31")]
    for run in (logged, parts):
        lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
        for line in lines:
            told = [name for name in line if name.startswith("loss_at/")]
            assert told == (names if line["step"] % 2 == 0 else [])
    without = [{k: v for k, v in line.items() if k not in names} for line in figures(logged)]
    assert without == figures(plain)
    for line, other in zip(figures(logged), figures(parts), strict=True):
        assert line == pytest.approx(other, rel=1e-3)
