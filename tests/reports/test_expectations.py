"""Expectations say yes, NO or nothing, from the numbers alone."""

from dataclasses import replace

import pytest

from meanbank.reports import expectations_table
from meanbank.reports.results import Bigram, DemoResults, LanguageArm, RecallArm, RecallRun


def recall_arm(name: str, easy: list[float], hard: list[float]) -> RecallArm:
    runs = tuple(
        RecallRun(seed=seed, accuracy={(128, 12): first, (512, 48): second})
        for seed, (first, second) in enumerate(zip(easy, hard, strict=True))
    )
    return RecallArm(name=name, label=name, runs=runs)


@pytest.fixture
def results(tmp_path) -> DemoResults:
    language = (
        LanguageArm(name="full", label="full", bits_per_byte=1.9),
        LanguageArm(name="kvm_sqrt", label="kvm", bits_per_byte=1.8),
    )
    recall = (
        recall_arm("full", [1.0, 0.99], [0.99, 0.99]),
        recall_arm("kvm_fixed", [0.87, 0.88], [0.41, 0.42]),
        recall_arm("kvm_sqrt", [0.98, 0.96], [0.81, 0.87]),
    )
    return DemoResults(
        folder=tmp_path,
        language=language,
        recall=recall,
        bigram=Bigram(bits_per_byte=1.95, training_tokens=None),
    )


def verdicts(results: DemoResults) -> list[str]:
    return [row.cells[-1] for row in expectations_table(results).rows]


def test_all_hold(results):
    assert verdicts(results) == ["yes"] * 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"bigram": Bigram(bits_per_byte=1.85, training_tokens=None)}, ["NO", "yes", "yes", "yes"]),
        ({"bigram": None}, ["–", "yes", "yes", "yes"]),
        ({"language": ()}, ["–", "yes", "yes", "yes"]),
    ],
)
def test_the_bigram(results, change, expected):
    assert verdicts(replace(results, **change)) == expected


def test_one_bad_seed_is_enough(results):
    full, fixed, _ = results.recall
    growing = recall_arm("kvm_sqrt", [0.98, 0.94], [0.81, 0.71])
    assert verdicts(replace(results, recall=(full, fixed, growing))) == ["yes", "yes", "NO", "NO"]
    empty = RecallArm(name="kvm_sqrt", label="kvm", runs=())
    assert verdicts(replace(results, recall=(full, fixed, empty))) == ["yes", "yes", "–", "–"]
