"""What the two papers' authors' own code gave: inputs, weights, logits, gradients, caches, traces.

Measured in fp32 on a CPU; source and commit are in each .json. `gradrow` and `gradcol` are the sums
of a large matrix's gradient over its columns and rows.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from meanbank import MeanbankForCausalLM
from meanbank.interop import Conversion

VECTORS = Path(__file__).parent / "vectors"
LOGITS, LOSS = 2e-5, 1e-5  # largest differences allowed


def cases(paper: str) -> list[str]:
    return sorted(p.stem for p in (VECTORS / paper).glob("*.json"))


def load(paper: str, case: str) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The description of a case, its tensors, and the weights by the authors' names."""
    info = json.loads((VECTORS / paper / f"{case}.json").read_text())
    vectors = load_file(VECTORS / paper / f"{case}.safetensors")
    for name in ("input_ids", "labels"):
        vectors[name] = vectors[name].long()
    shared = load_file(VECTORS / paper / info["params_in"]) if "params_in" in info else vectors
    names = info.get("param_names") or [n[6:] for n in shared if n.startswith("param.")]
    return info, vectors, {name: shared[f"param.{name}"] for name in names}


def loss_of(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)


def decode(model: MeanbankForCausalLM, ids: torch.Tensor, start: int):
    """Logits of the tokens from `start` on, read one by one, and the cache after them."""
    with torch.inference_mode():
        cache = model(ids[:, :start], use_cache=True).cache
        logits = [
            model(ids[:, t : t + 1], cache=cache, use_cache=True).logits
            for t in range(start, ids.shape[1])
        ]
    return torch.cat(logits, dim=1), cache


def close(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    assert found.shape == wanted.shape, name
    assert (found - wanted).abs().max() <= LOGITS, name


def check_gradients(
    model: MeanbankForCausalLM, conversion: Conversion, vectors: dict, padding: int = 0
) -> None:
    """Compare every recorded gradient by norm, and see that every parameter of ours has one.

    padding: rows of padded vocabulary in theirs, whose gradients are zero.
    """
    theirs = {their: ours for ours, their in conversion.names.items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = set()
    for vector, reference in vectors.items():
        kind, _, name = vector.partition(".")
        if not kind.startswith("grad"):
            continue
        gradient = gradients[theirs[name]]
        assert gradient is not None, name
        compared.add(theirs[name])
        if kind == "gradrow":
            gradient = gradient.sum(1)
        elif kind == "gradcol":
            gradient = gradient.sum(0)
        wanted = reference
        if gradient.numel() != reference.numel():
            assert not reference[-padding:].any(), vector
            wanted = reference[:-padding]
        error = torch.linalg.vector_norm(gradient.reshape(wanted.shape) - wanted)
        assert error <= 1e-4 * torch.linalg.vector_norm(wanted) + 1e-6, vector
    assert compared == set(gradients)
