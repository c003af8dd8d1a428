"""A random-weight Llama checkpoint as a bf16 GGUF file (llama.cpp's own script refuses an unknown tokenizer).

python convert_gguf.py CHECKPOINT OUT.gguf      in the environment of transformers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def write_tokenizer(writer: gguf.GGUFWriter, content: dict[str, Any], config: dict[str, Any]) -> None:
    vocabulary = dict(content["model"]["vocab"])
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary |= special
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if len(tokens) != config["vocab_size"]:
        raise SystemExit(f"tokenizer.json: expected {config['vocab_size']} tokens, got {len(tokens)}")
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = content["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of a query or key projection in the order of llama.cpp, which rotates neighbours, not halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_tensor(writer: gguf.GGUFWriter, name: str, values: torch.Tensor) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values.float().numpy())
        return
    data = values.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.checkpoint / "config.json").read_text())
    weights = load_file(args.checkpoint / "model.safetensors")
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_name(args.checkpoint.name)
    write_config(writer, config)
    write_tokenizer(writer, json.loads((args.checkpoint / "tokenizer.json").read_text()), config)
    for theirs, ours in OTHER_NAMES.items():
        write_tensor(writer, f"{ours}.weight", weights[f"{theirs}.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER_NAMES.items():
            values = weights[f"model.layers.{layer}.{theirs}.weight"]
            if theirs in heads:
                values = interleave(values, heads[theirs])
            write_tensor(writer, f"blk.{layer}.{ours}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
