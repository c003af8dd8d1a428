"""T5, UMT5 and encoders of T5 in GGUF files, as llama.cpp's converter (conversion/t5.py) has them.

The activation is not in the file: layers with a gate have GELU, others ReLU.  A file without ``output`` has the table
of tokens in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from penstock.checkpoint.gguf.architectures.architecture import Tensors
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["T5_ARCHITECTURES", "t5_sources", "t5_values"]

T5_ARCHITECTURES: Final = {"t5": "t5", "t5encoder": "t5"}
"""The model_type of each architecture."""
_CLASSES: Final = {"t5": "ForConditionalGeneration", "t5encoder": "EncoderModel"}
_KEYS: Final = (
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.relative_buckets_count", "attention.value_length", "block_count",
    "context_length", "decoder_block_count", "decoder_start_token_id", "embedding_length", "feed_forward_length",
    "vocab_size",
)  # fmt: skip
_MAX_LAYERS: Final = 1 << 16
_TENSOR: Final = re.compile(r"(enc|dec)\.blk\.(0|[1-9]\d{0,4})\.([a-z_]+)\.weight")
_TOP: Final = {
    "token_embd.weight": "shared.weight",
    "enc.output_norm.weight": "encoder.final_layer_norm.weight",
    "dec.output_norm.weight": "decoder.final_layer_norm.weight",
    "output.weight": "lm_head.weight",
}
_STACKS: Final = {"enc": "encoder", "dec": "decoder"}
_ATTENTION: Final = {
    "attn_norm": "0.layer_norm",
    **{f"attn_{part}": f"0.SelfAttention.{part}" for part in "qkvo"},
    "attn_rel_b": "0.SelfAttention.relative_attention_bias",
    "cross_attn_norm": "1.layer_norm",
    **{f"cross_attn_{part}": f"1.EncDecAttention.{part}" for part in "qkvo"},
    "cross_attn_rel_b": "1.EncDecAttention.relative_attention_bias",
}


def t5_values(metadata: Metadata, name: str, tensors: Tensors) -> dict[str, Any]:
    """Return the values of config.json; UnsupportedError for a key that is not read."""
    for key in metadata.values:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in _KEYS:
            raise UnsupportedError(f"{metadata.file}: {ascii(key)[1:-1]} is not supported", param=key)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidFileError(
            f"{metadata.file}: expected a matrix token_embd.weight, got none", param="token_embd.weight"
        )
    num_layers = metadata.integer(f"{name}.block_count", min=1, max=_MAX_LAYERS)
    heads = metadata.integer(f"{name}.attention.head_count", min=1)
    head_dim = metadata.integer(f"{name}.attention.key_length", min=1)
    for key, expected in (("attention.value_length", head_dim), ("attention.head_count_kv", heads)):
        if metadata.integer(f"{name}.{key}", expected) != expected:
            raise metadata.error(f"{name}.{key}", f"{expected}")
    model_type = "umt5" if "enc.blk.1.attn_rel_b.weight" in tensors else "t5"
    return {
        "model_type": model_type,
        "architectures": [f"{model_type.upper()}{_CLASSES[name]}"],
        "vocab_size": embedding.shape[0],
        "d_model": metadata.integer(f"{name}.embedding_length", min=1),
        "d_ff": metadata.integer(f"{name}.feed_forward_length", min=1),
        "num_layers": num_layers,
        "num_decoder_layers": metadata.integer(f"{name}.decoder_block_count", num_layers, min=1, max=_MAX_LAYERS),
        "num_heads": heads,
        "d_kv": head_dim,
        "relative_attention_num_buckets": metadata.integer(f"{name}.attention.relative_buckets_count", min=1),
        "n_positions": metadata.integer(f"{name}.context_length", min=1),
        "layer_norm_epsilon": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if "enc.blk.0.ffn_gate.weight" in tensors else "relu",
        "decoder_start_token_id": metadata.integer(f"{name}.decoder_start_token_id", 0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def t5_sources(tensors: Iterable[StoredTensor]) -> dict[str, GgufSource]:
    """Return the source of each tensor by its name in a checkpoint folder; an unknown name stays."""
    stored = {tensor.name for tensor in tensors}
    gated = "enc.blk.0.ffn_gate.weight" in stored
    inner = {"ffn_gate": "wi_0", "ffn_up": "wi_1" if gated else "wi", "ffn_down": "wo"}
    sources = {}
    for name in stored:
        match = _TENSOR.fullmatch(name)
        if match is None:
            sources[_TOP.get(name, name)] = GgufSource(name)
            continue
        stack, layer, part = match.groups()
        last = 2 if stack == "dec" else 1
        if part == "ffn_norm":
            own: str | None = f"{last}.layer_norm"
        else:
            own = f"{last}.DenseReluDense.{inner[part]}" if part in inner else _ATTENTION.get(part)
        full = name if own is None else f"{_STACKS[stack]}.block.{layer}.layer.{own}.weight"
        sources[full] = GgufSource(name)
    return sources
