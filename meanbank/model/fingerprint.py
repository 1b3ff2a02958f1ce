"""Fingerprints: whether a model or a tokenizer is the one that something was made with."""

import hashlib
import json
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from meanbank.core.stamps import Stamp
from meanbank.core.tensor_file import tensor_bytes
from meanbank.model.bank_storage import read_whole
from meanbank.model.config import MeanbankConfig

SIZES = (
    "backbone",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "value_head_dim",
    "intermediate_size",
    "rope_theta",
    "residual_scale",
    "mlp_token_shift",
)


def model_fingerprint(model: PreTrainedModel) -> str:
    """sha256 of what a state depends on: sizes, layers, and the backbone's weights, bit by bit.

    The output head is not in it, nor is the backend of a layer's operator. It reads every weight
    once (seconds a gigabyte) and is kept on the model until a weight changes; a change through
    `parameter.data` goes unnoticed.
    """
    backbone: Any = model.base_model
    weights: dict[str, Tensor] = backbone.state_dict()
    stamps = {name: Stamp(tensor) for name, tensor in weights.items()}
    kept = backbone.__dict__.get("_fingerprint")
    if kept is None or kept[0] != stamps:
        with read_whole(backbone.stored_tables):
            kept = (stamps, _digest(backbone.config, weights))
        backbone.__dict__["_fingerprint"] = kept
    return kept[1]


def _digest(config: MeanbankConfig, weights: dict[str, Tensor]) -> str:
    description: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
    description["layers"] = [
        {**layer, "memory": {k: v for k, v in layer["memory"].items() if k != "backend"}}
        for layer in config.layers or []
    ]
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode("utf-8"))
    for name, tensor in sorted(weights.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor.cpu().contiguous()))
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 of a tokenizer's JSON, without truncation and padding, which a load may switch off.

    tokenizer: of the `tokenizers` package, or a fast one of `transformers`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    description = json.loads(backend.to_str())
    description.update(truncation=None, padding=None)
    text = json.dumps(description, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
