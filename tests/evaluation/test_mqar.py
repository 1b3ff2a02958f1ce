"""MQAR as an evaluation, with models whose answers are known."""

from types import SimpleNamespace

import pytest
import torch

from meanbank.data import RecallConfig, Stage
from meanbank.evaluation import Mqar
from meanbank.evaluation.base import Evaluation, Subject
from meanbank.evaluation.driver import run_evaluation
from tests.conformance.models import make_model

STAGE = Stage(fraction=1.0, length=32, pairs=(4,))
RECALL = RecallConfig(keys=20, values=10, fillers=4, curriculum=(STAGE,))


class Near(torch.nn.Module):
    """Knows the value of a key whose pair began at most `reach` tokens ago."""

    device = torch.device("cpu")

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, RECALL.vocab_size)
        for row, tokens in enumerate(input_ids.tolist()):
            for at, token in enumerate(tokens):
                first = tokens.index(token)
                if 0 < at - first <= self.reach:
                    logits[row, at, tokens[first + 1]] = 1
        return SimpleNamespace(logits=logits)


def subject(model, recall=RECALL) -> Subject:
    return Subject(name="model", model=model, recall=recall)


def test_accuracy_by_distance():
    evaluation = Mqar(grid=((32, 4), (64, 8)), sequences=20, batch_size=6)
    everything = run_evaluation(evaluation, subject(Near(1000)))
    assert everything.scores == {"mqar@32/4": 1.0, "mqar@64/8": 1.0}
    assert [cell["queries"] for cell in everything.results["grid"]] == [80, 160]
    assert everything.results["chance"] == 0.1
    near = run_evaluation(evaluation, subject(Near(15)))
    rows = near.results["by_distance"]
    assert {row["below"] for row in rows} == {2 * row["from"] for row in rows}
    for row in rows:
        assert row["accuracy"] == (1.0 if row["from"] < 16 else 0.0)
    for cell in near.results["grid"]:
        size = (cell["length"], cell["pairs"])
        own = [row for row in rows if (row["length"], row["pairs"]) == size]
        assert sum(row["queries"] for row in own) == cell["queries"]
        right = sum(row["queries"] for row in own if row["from"] < 16)
        assert cell["accuracy"] == pytest.approx(right / cell["queries"])
        name = f"mqar@{cell['length']}/{cell['pairs']}"
        scores = [r["scores"][name] for r in near.records if name in r["scores"]]
        assert len(scores) == 20
        assert sum(scores) / 20 == pytest.approx(cell["accuracy"]) == near.scores[name]


def test_no_score_depends_on_the_batch_size():
    torch.manual_seed(0)
    model = make_model(
        "kvm_power_law", "bank", "grouped", torch.float32, layers=1, vocab_size=RECALL.vocab_size
    )
    runs = [
        run_evaluation(Mqar(grid=((40, 6),), sequences=9, batch_size=size), subject(model))
        for size in (1, 8)
    ]
    assert runs[0] == runs[1]
    fewer = run_evaluation(Mqar(grid=((40, 6),), sequences=4), subject(model))
    assert fewer.records == runs[0].records[:4]
    other = run_evaluation(Mqar(grid=((40, 6),), sequences=4, seed=1), subject(model))
    assert other.prompt_hash != fewer.prompt_hash


def test_what_is_refused():
    with pytest.raises(ValueError, match="model was not trained on the recall source"):
        run_evaluation(Mqar(), subject(Near(1), recall=None))
    with pytest.raises(ValueError, match="needs from 1 to 10 pairs"):
        run_evaluation(Mqar(), subject(Near(1)))
    with pytest.raises(ValueError, match="grid needs distinct"):
        Mqar(grid=((32, 4), (32, 4)))
    assert Evaluation.family["mqar"] is Mqar
