"""CONTRIBUTING's worked examples, written as files, pass the conformance list."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from meanbank.evaluation import Evaluation
from meanbank.memory import MemoryConfig
from meanbank.studies.evaluations import evaluate, of_run, read_tasks
from meanbank.training import load_run
from meanbank.values import ValueSourceConfig
from tests.conformance import models, test_gradients, test_matrix, test_rollback
from tests.model import test_context_files
from tests.planning import test_flops, test_memory_plan

GUIDE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = {
    "landmarks": (MemoryConfig, models.MEMORIES),
    "hashed": (ValueSourceConfig, models.SOURCES),
}


@pytest.fixture(params=EXAMPLES)
def example(request, tmp_path, monkeypatch):
    """The example's tag, registered as the guide says, its line added to the test's table."""
    tag = request.param
    family, table = EXAMPLES[tag]
    (line,) = re.findall(rf"`(\"{tag}\": .*?),`", GUIDE)
    load_example(tag, tmp_path, monkeypatch)
    monkeypatch.setitem(table, tag, ast.literal_eval(f"{{{line}}}")[tag])
    yield tag
    del family.family[tag]


def load_example(file: str, folder: Path, monkeypatch) -> None:
    """Write the example that the guide calls meanbank/*/FILE.py, and import it."""
    (code,) = re.findall(rf"```python\n(# meanbank/\w+/{file}\.py\n.*?)```", GUIDE, flags=re.DOTALL)
    name = f"guide_{file}"
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("backbone", models.BACKBONES)
def test_the_examples_pass_the_list(example, backbone, tmp_path):
    if example in models.MEMORIES:
        for source in ("projection", "bank", "mixed_bank"):
            test_matrix.test_the_list(example, source, backbone, tmp_path / source)
            test_flops.test_flops_are_those_of_the_model(backbone, example, source, "all")
            test_memory_plan.check_states(example, source, backbone)
        test_rollback.test_every_crop_at_every_place(example, backbone)
    else:
        for memory in ("full", "kvm_power_law", "rwkv7"):
            test_matrix.test_the_list(memory, example, backbone, tmp_path / memory)
            test_flops.test_flops_are_those_of_the_model(backbone, memory, example, "all")
            test_memory_plan.check_states(memory, example, backbone)


def test_their_contexts_are_saved(example, tmp_path):
    memory = example if example in models.MEMORIES else "full"
    source = example if example in models.SOURCES else "bank"
    test_context_files.check_round_trips(memory, "nanochat", [(source, torch.float32)], tmp_path)


def test_their_gradients(example):
    for length in test_gradients.LENGTHS:
        if example in models.MEMORIES:
            test_gradients.test_memories(example, length)
        else:
            test_gradients.test_value_sources(example, length)


def test_the_example_of_an_evaluation(trained, tmp_path, monkeypatch):
    load_example("last_token", tmp_path, monkeypatch)
    try:
        tasks = read_tasks(["last-token"], ["last-token.tokens=32", "last-token.count=5"])
        run = load_run(trained, "cpu")
        (result,) = evaluate(of_run(run), tasks)
        found = run.corpus().held_out.documents_at_least(32)[:5]
        assert result["results"]["documents"] == len(found) > 0
        right = 0
        for document in found:
            tokens = torch.from_numpy(run.corpus().held_out.document(document)[:32].astype("int64"))
            right += int(run.model(tokens[None, :-1]).logits[0, -1].argmax() == tokens[-1])
        assert result["scores"] == {"last-token": right / len(found)}
    finally:
        del Evaluation.family["last-token"]
