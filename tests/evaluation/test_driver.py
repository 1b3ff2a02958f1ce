"""Running evaluations: batches, and records that survive an interruption."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.core.config import build
from meanbank.core.files import locked
from meanbank.data import RecallConfig
from meanbank.evaluation import Evaluation, Record, Sample, Subject, run_evaluation
from meanbank.evaluation.base import mean_scores, prompt_hash
from meanbank.evaluation.driver import batches, read_records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squares(Evaluation, tag="squares-for-tests"):
    count: int = 7
    size: int = 2

    @property
    def batch(self) -> int:
        return self.size

    def inputs(self) -> dict[str, str]:
        return dict(FILES)

    def samples(self, subject: Subject) -> list[Sample]:
        return [
            Sample(id=f"n{n}", content=n, group="odd" if n >= 5 else "even")
            for n in range(self.count)
        ]

    def measure(self, subject: Subject, samples: Sequence[Sample]) -> list[Record]:
        STARTED.append([sample.content for sample in samples])
        if len(STARTED) == FAILING:
            raise KeyboardInterrupt
        return [
            {"prompt": prompt_hash(s.id), "square": s.content**2, "scores": {self.title: s.content}}
            for s in samples
        ]

    def results(self, subject: Subject, records: Sequence[Record]) -> dict:
        return {"squares": [record["square"] for record in records]}

    def scores(self, results: dict) -> dict[str, float]:
        return {self.title: sum(results["squares"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedSquares(Squares, tag="timed-squares-for-tests"):
    alone = True


STARTED: list[list[int]] = []
FILES: dict[str, str] = {}
FAILING = 0


@pytest.fixture
def subject():
    STARTED.clear(), FILES.clear()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=10, num_attention_heads=1, **sizes)
    yield Subject(name="a model", model=LlamaForCausalLM(config).train())
    globals()["FAILING"] = 0


def test_batches_stay_within_their_groups(subject):
    outcome = run_evaluation(Squares(), subject)
    assert STARTED == [[0, 1], [2, 3], [4], [5, 6]]
    assert outcome.results == {"squares": [0, 1, 4, 9, 16, 25, 36]}
    assert outcome.scores == {"squares-for-tests": 91}
    assert not subject.model.training


@given(st.lists(st.sampled_from("ab"), max_size=12), st.integers(1, 5))
def test_batches_are_all_samples_in_order(groups, size):
    samples = [Sample(id=str(n), group=group) for n, group in enumerate(groups)]
    made = list(batches(samples, size))
    assert [sample for batch in made for sample in batch] == samples
    assert all(1 <= len(batch) <= size for batch in made)
    assert all(len({sample.group for sample in batch}) == 1 for batch in made)


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_an_interrupted_evaluation_goes_on(failing, subject, tmp_path):
    log = tmp_path / "records.jsonl"
    globals()["FAILING"] = failing
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(Squares(), subject, log, "weights")
    globals()["FAILING"] = 0
    done = STARTED[:-1]
    log.write_bytes(log.read_bytes() + b'{"id": "n6", "squ')  # torn by a kill
    whole = run_evaluation(Squares(), subject, log, "weights")
    assert whole == run_evaluation(Squares(), subject)
    assert STARTED[failing : len(STARTED) - 4] == [[0, 1], [2, 3], [4], [5, 6]][len(done) :]
    count = len(STARTED)
    assert run_evaluation(Squares(), subject, log, "weights") == whole
    assert len(STARTED) == count, "measured again"


@pytest.mark.parametrize(
    "changed", ["identity", "settings", "inputs", "tokenizer", "damage", "no id"]
)
def test_records_of_something_else_are_not_used(changed, subject, tmp_path):
    log = tmp_path / "records.jsonl"
    run_evaluation(Squares(), subject, log, "weights")
    if changed == "damage":
        log.write_bytes(b"\xff\x00" + log.read_bytes())
    if changed == "no id":
        log.write_bytes(log.read_bytes().replace(b'"id"', b'"name"'))
    if changed == "inputs":
        FILES["numbers.txt"] = "another digest"
    if changed == "tokenizer":
        subject = dataclasses.replace(subject, tokenizer=Tokenizer(models.BPE()))
    evaluation = Squares(count=6) if changed == "settings" else Squares()
    run_evaluation(evaluation, subject, log, "others" if changed == "identity" else "weights")
    assert len(STARTED) == 8


def test_what_is_timed_is_measured_again(subject, tmp_path):
    """Once it is whole; what a stopped one has measured stays."""
    log = tmp_path / "records.jsonl"
    globals()["FAILING"] = 3
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(TimedSquares(), subject, log)
    globals()["FAILING"] = 0
    run_evaluation(TimedSquares(), subject, log)
    assert len(STARTED) == 3 + 2
    run_evaluation(TimedSquares(), subject, log)
    assert len(STARTED) == 5 + 4
    assert len(list(read_records(log))) == 7


def test_two_processes_do_not_write_one_log(subject, tmp_path):
    log = tmp_path / "records.jsonl"
    with locked(log), pytest.raises(ValueError, match="another process is writing") as caught:
        run_evaluation(Squares(), subject, log)
    assert "\n" not in str(caught.value)
    run_evaluation(Squares(), subject, log)
    assert len(list(read_records(log))) == 7


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "memory", "contexts": [8, 8]},
        {"type": "serving", "contexts": [8, 8]},
    ],
)
def test_nothing_is_measured_twice(settings, tmp_path):
    evaluation = build(Evaluation, settings)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = MeanbankForCausalLM(MeanbankConfig(vocab_size=10, **sizes))
    subject, log = Subject(name="it", model=model, recall=RecallConfig()), tmp_path / "log"
    with pytest.raises(ValueError, match=f"{evaluation.title} would measure .* twice"):
        run_evaluation(evaluation, subject, log)
    assert not log.exists()


def test_settings_are_data():
    made = build(Evaluation, {"type": "squares-for-tests", "count": 3, "name": "mine"})
    assert (made, made.title) == (Squares(count=3, name="mine"), "mine")


def test_prompt_hashes_tell_prompts_apart():
    ids = [1, 2, 300]
    assert prompt_hash(ids) == prompt_hash(torch.tensor(ids)) != prompt_hash([1, 2])
    assert prompt_hash("a") == prompt_hash(b"a") != prompt_hash("b")


def test_scores_are_means_over_the_records_that_have_them():
    records = [{"scores": {"a": 1, "b": 4}}, {"scores": {"a": 0}}, {}]
    assert mean_scores(records) == {"a": 0.5, "b": 4}
