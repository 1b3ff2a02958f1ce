"""Equality with the KVM authors' implementation: logits, losses, gradients, decoding, routing.

The vectors were measured with their code (source and commit in each .json), in fp32 on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from meanbank import MeanbankConfig, MeanbankForCausalLM
from meanbank.ops.kvm import api
from tests.parity.authors import our_config, our_name

VECTORS = Path(__file__).parent / "vectors"
WITH_GRADIENTS = [
    "kvm_fixed",
    "kvm_sqrt",
    "kvm_saturating_swa",
    "gptalpha",
    "gptalpha_bswa",
    "gptalpha_halfrope_swa",
]
CASES = [*WITH_GRADIENTS, "kvm_no_vlens", "kvm_sqrt_append_gate"]
TRACED = [case for case in CASES if case.startswith("kvm")]


def load(case: str) -> tuple[dict, dict[str, torch.Tensor], MeanbankForCausalLM]:
    info = json.loads((VECTORS / f"{case}.json").read_text())
    vectors = load_file(VECTORS / f"{case}.safetensors")
    weights = load_file(VECTORS / info["params_in"]) if "params_in" in info else vectors
    model = MeanbankForCausalLM(MeanbankConfig(**our_config(info["config"]))).eval()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    state = {our_name(n.removeprefix("param.")): v for n, v in weights.items() if "param." in n}
    assert set(state) == set(shapes)
    model.load_state_dict({name: value.view(shapes[name]) for name, value in state.items()})
    return info, vectors, model


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_loss(case):
    _, vectors, model = load(case)
    logits = model(vectors["input_ids"], use_cache=False).logits
    assert (logits - vectors["logits"]).abs().max() <= 2e-5
    assert abs(loss_of(logits, vectors["labels"]).item() - vectors["loss"].item()) <= 1e-5


@pytest.mark.parametrize("case", WITH_GRADIENTS)
def test_gradients(case):
    _, vectors, model = load(case)
    loss_of(model(vectors["input_ids"], use_cache=False).logits, vectors["labels"]).backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    compared = set()
    for vector, reference in vectors.items():
        kind, _, name = vector.partition(".")
        if not kind.startswith("grad"):
            continue
        gradient = ours[our_name(name)]
        compared.add(our_name(name))
        if kind != "grad":  # large matrices are recorded as sums over their columns and rows
            gradient = gradient.sum({"gradrow": 1, "gradcol": 0}[kind])
        error = torch.linalg.vector_norm(gradient.view(reference.shape) - reference)
        assert error <= 1e-4 * torch.linalg.vector_norm(reference) + 1e-6, vector
    assert compared == set(ours)


@pytest.mark.parametrize("case", CASES)
def test_decoding_token_by_token(case):
    info, vectors, model = load(case)
    ids, start = vectors["input_ids"], info["decode_from"]
    with torch.inference_mode():
        cache = model(ids[:, :start], use_cache=True).cache
        logits = [
            model(ids[:, t : t + 1], cache=cache, use_cache=True).logits
            for t in range(start, ids.shape[1])
        ]
    wanted = (
        vectors["decode.logits"] if "decode.logits" in vectors else vectors["logits"][:, start:]
    )
    assert (torch.cat(logits, dim=1) - wanted).abs().max() <= 2e-5


@pytest.mark.parametrize("case", TRACED)
def test_routing_and_appends_are_theirs(case, monkeypatch):
    _, vectors, model = load(case)
    traces: list[list] = []

    def traced(*arguments):
        traces.append([])
        return reference(*arguments[:-1], traces[-1])

    reference = api.BACKENDS["reference"]
    monkeypatch.setitem(api.BACKENDS, "reference", traced)
    with torch.inference_mode():
        model(vectors["input_ids"], use_cache=False)
    layers = [i for i, plan in enumerate(model.config.plans()) if plan.memory.tag == "kvm"]
    checked = 0
    for layer, trace in zip(layers, traces, strict=True):
        for number, update in enumerate(trace[1:]):  # the first one makes the initial rows
            name = f"trace.L{layer}.u{number}"
            if f"{name}.merge_pos" not in vectors:
                continue
            checked += 1
            theirs = vectors.get(f"{name}.append_pos")
            count = 0 if theirs is None else theirs.shape[-1]
            assert update.appended.shape[-1] == count
            if theirs is not None:
                assert torch.equal(update.appended + update.start, theirs.long())
            merged = vectors[f"{name}.merge_pos"].long() - update.start
            assert torch.equal(update.route.gather(-1, merged), vectors[f"{name}.route"].long())
            if f"{name}.s_k" in vectors:
                assert (update.rows.key - vectors[f"{name}.s_k"]).abs().max() <= 2e-5
                assert (update.rows.value - vectors[f"{name}.s_v"]).abs().max() <= 2e-5
                scale = vectors[f"{name}.s_vlen"][..., 0]
                assert (update.rows.scale - scale).abs().max() <= 2e-5
    assert checked >= 2, "no recorded update was compared"


def test_every_length():
    info, vectors, model = load("kvm_lengths")
    for length, expected in info["lengths"].items():
        ids = vectors["input_ids"][:, : int(length)]
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        loss = loss_of(logits, vectors["labels"][:, : int(length)])
        loss.backward()
        assert (logits - vectors[f"T{length}.logits"]).abs().max() <= 2e-5, length
        assert abs(loss.item() - expected["loss"]) <= 1e-5, length
        for name, parameter in model.named_parameters():
            theirs = {our_name(n): norm for n, norm in expected["grad_norms"].items()}[name]
            ours = 0.0 if parameter.grad is None else parameter.grad.norm().item()
            assert abs(ours - (theirs or 0.0)) <= 1e-4 * (theirs or 0.0) + 1e-6, (length, name)
