"""Equality with the KVM authors' code: logits, losses, gradients, decoding, caches, routing."""

import pytest
import torch

from meanbank.interop import kvm_paper
from meanbank.ops.kvm import api
from tests.parity.recorded import (
    LOGITS,
    LOSS,
    cases,
    check_gradients,
    close,
    decode,
    load,
    loss_of,
)

LENGTHS = "kvm_lengths"
CASES = [case for case in cases("kvm") if case != LENGTHS]
TRACED = [case for case in CASES if case.startswith("kvm")]
PREFILLED = 20  # tokens read at once before the others one by one


def converted(case: str):
    info, vectors, weights = load("kvm", case)
    conversion = kvm_paper.convert({"model_type": "rwkv7backbone", **info["config"]}, weights)
    assert not conversion.dropped
    return info, vectors, conversion, conversion.model()


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients(case):
    _, vectors, conversion, model = converted(case)
    logits = model(vectors["input_ids"], use_cache=False).logits
    close(logits, vectors["logits"])
    loss = loss_of(logits, vectors["labels"], -100)
    assert abs(loss.item() - vectors["loss"].item()) <= LOSS
    loss.backward()
    check_gradients(model, conversion, vectors)


@pytest.mark.parametrize("case", CASES)
def test_decoding_token_by_token_and_caches(case):
    _, vectors, _, model = converted(case)
    logits, cache = decode(model, vectors["input_ids"], PREFILLED)
    close(logits, vectors["logits"][:, PREFILLED:])
    for layer, held in enumerate(cache.layers):
        found = {**tails(held.state), **memory(held.state.attention)}
        prefix = f"cache.L{layer}."
        for name in (n.removeprefix(prefix) for n in vectors if n.startswith(prefix)):
            if name != "att_x_final_token":  # theirs keeps it for a mode that is not used
                compare(name, found, vectors[prefix + name])


def tails(state) -> dict[str, torch.Tensor]:
    """Last tokens that the next ones are shifted towards, by the authors' names."""
    found = {"mlp_final_token": state.mlp.last}
    attention = state.attention
    if hasattr(attention, "matrix"):
        matrix = attention.matrix.mT  # theirs is keys x values
        return {**found, "att_final_token": attention.last.last, "rwkv7_time_mix": matrix}
    return {
        **found,
        "att_q_final_token": attention.address.query.last,
        "att_k_final_token": attention.address.key.last,
        "att_v_final_token": attention.values.last,
    }


def memory(attention) -> dict[str, torch.Tensor]:
    """What a memory holds, by the authors' names."""
    state = getattr(attention, "memory", None)
    if state is None:
        return {}
    if not hasattr(state, "memory"):  # full attention and windows
        return {"k": state.key, "v": state.values}
    inner = state.memory
    if not hasattr(inner, "window_gate"):
        rows = {"ovq_d_k": inner.rows.key, "ovq_d_v": inner.rows.value}
        rows["ovq_d_counts"] = inner.rows.count[..., None]
        return {**rows, "ovq_pending_k": inner.window_key, "ovq_pending_v": state.values}
    gates = inner.window_gate
    if gates is None:  # without a gate theirs holds ones
        gates = torch.ones_like(inner.window_key[..., 0])
    return {
        "kvm_bswa_k": inner.window_key,
        "kvm_bswa_v": state.values,
        "kvm_bswa_merge_gate": gates[..., None],
        "kvm_s_k": inner.rows.key,
        "kvm_s_v": inner.rows.value,
        "kvm_s_vlen": inner.rows.scale[..., None],
    }


def compare(name: str, found: dict[str, torch.Tensor], reference: torch.Tensor) -> None:
    """Compare one tensor of a cache; layouts and spare rows of theirs are taken off."""
    kind = name.removeprefix("kvm_alt_swa_swa_").removeprefix("bswa_")
    ours = found[kind if kind in "kv" else name]
    if reference.ndim == 4 and reference.shape[1] != ours.shape[1]:
        reference = reference.transpose(1, 2)  # theirs keeps tokens before heads there
    if kind in "kv":  # a window need not keep the token that leaves it next
        reference = reference[:, :, -ours.shape[2] :]
    elif reference.ndim == 4:  # a dictionary of theirs is allocated whole
        assert not reference[:, :, ours.shape[2] :].any(), name
        reference = reference[:, :, : ours.shape[2]]
    close(ours, reference, name)


@pytest.mark.parametrize("backend", api.BACKENDS)
@pytest.mark.parametrize("case", TRACED)
def test_routing_and_appends_are_theirs(case, backend, monkeypatch):
    _, vectors, _, model = converted(case)
    traces: list[list] = []

    def traced(*arguments):
        traces.append([])
        return operator(*arguments[:-1], traces[-1])

    operator = api.BACKENDS[backend]
    monkeypatch.setitem(api.BACKENDS, "fused", traced)  # what is taken without gradients
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
                close(update.rows.key, vectors[f"{name}.s_k"])
                close(update.rows.value, vectors[f"{name}.s_v"])
                close(update.rows.scale[..., None], vectors[f"{name}.s_vlen"])
    assert checked >= 2, "no recorded update was compared"


def test_every_length():
    info, vectors, conversion, model = converted(LENGTHS)
    for length, expected in info["lengths"].items():
        ids = vectors["input_ids"][:, : int(length)]
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        loss = loss_of(logits, vectors["labels"][:, : int(length)], -100)
        loss.backward()
        assert (logits - vectors[f"T{length}.logits"]).abs().max() <= LOGITS, length
        assert abs(loss.item() - expected["loss"]) <= LOSS, length
        for name, parameter in model.named_parameters():
            theirs = expected["grad_norms"][conversion.names[name]] or 0.0
            ours = 0.0 if parameter.grad is None else parameter.grad.norm().item()
            assert abs(ours - theirs) <= 1e-4 * theirs + 1e-6, (length, name)
