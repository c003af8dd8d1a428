"""A folder of a tiny language model with random weights, written without PyTorch and without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from penstock.quant.tensor_writer import TensorEntry, TensorWriter

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 128, 2
LOUD = "model.layers.1.mlp.down_proj.weight"
"""The tensor whose rounding to 4 bits changes the logits most: one column of each group is far larger."""


def write_tiny_llama(folder: Path, *, tied: bool = False, hidden: int = HIDDEN) -> Path:
    """Write config.json and float32 weights; the head has weights of its own unless ``tied``."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden // 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": tied,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    kv = hidden // 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCAB, hidden)}
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (INNER, hidden), "mlp.up_proj": (INNER, hidden),
            "mlp.down_proj": (hidden, INNER), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    rng = np.random.default_rng(0)
    writer = TensorWriter(folder / "model.safetensors", [TensorEntry(n, "F32", shape) for n, shape in shapes.items()])
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32) * np.float32(0.12) if len(shape) == 2 else np.ones(shape, "<f4")
        if name == LOUD:
            values[:, ::32] *= 12
        writer.add(name, values)
    writer.close()
    return folder
