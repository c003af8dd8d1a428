"""Small random checkpoints, written without PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, **changes: object) -> Path:
    """A Llama folder of random float32 weights, without a tokenizer: token ids in and out."""
    config = TINY | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config), folder / "model.safetensors", {"format": "pt"})
    return folder


def random_weights(config: dict[str, object]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    size = {key: int(value) for key, value in config.items() if isinstance(value, int)}
    hidden, inner, vocab = size["hidden_size"], size["intermediate_size"], size["vocab_size"]
    head_dim = hidden // size["num_attention_heads"]
    kv = size["num_key_value_heads"] * head_dim

    def matrix(rows: int, cols: int) -> np.ndarray:
        return rng.standard_normal((rows, cols), np.float32) * np.float32(1.5 / np.sqrt(cols))

    def norm() -> np.ndarray:
        return 1 + 0.1 * rng.standard_normal(hidden, np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    for layer in range(size["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "self_attn.q_proj.weight": matrix(hidden, hidden),
            p + "self_attn.k_proj.weight": matrix(kv, hidden),
            p + "self_attn.v_proj.weight": matrix(kv, hidden),
            p + "self_attn.o_proj.weight": matrix(hidden, hidden),
            p + "mlp.gate_proj.weight": matrix(inner, hidden),
            p + "mlp.up_proj.weight": matrix(inner, hidden),
            p + "mlp.down_proj.weight": matrix(hidden, inner),
            p + "input_layernorm.weight": norm(),
            p + "post_attention_layernorm.weight": norm(),
        }
    return tensors
