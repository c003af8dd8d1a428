"""BERT and XLM-RoBERTa in GGUF files (``bert``), in the forms of llama.cpp's converter (conversion/bert.py).

The file has no pooler and no masked-language head.  The table of positions of RoBERTa begins with that of the first
token, so that the network is the same as BERT's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import Source
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["ENCODERS", "HEAD_PARTS", "encoder_sources", "encoder_values"]

ENCODERS: Final = ("bert",)
HEAD_PARTS: Final = ("cls", "cls.output")
"""Linears of a classifier's head, which the pooling head has."""

_TOP: Final = {
    "token_embd": "word_embeddings",
    "position_embd": "position_embeddings",
    "token_types": "token_type_embeddings",
    "token_embd_norm": "LayerNorm",
}
_LAYER: Final = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_KEYS: Final = frozenset((
    "attention.causal", "attention.head_count", "attention.layer_norm_epsilon", "block_count",
    "classifier.output_labels", "context_length", "embedding_length", "feed_forward_length", "pooling_type",
    "vocab_size",
))  # fmt: skip
_TENSOR: Final = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?([a-z_]+(?:\.output)?)\.(weight|bias)")


def encoder_values(metadata: Metadata, name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the values of config.json; UnsupportedError for a key that is not read."""
    for key in metadata.values:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in _KEYS:
            raise UnsupportedError(f"{metadata.file}: {ascii(key)[1:-1]} is not supported", param=key)
    if metadata.flag(f"{name}.attention.causal", False):
        raise UnsupportedError(
            f"{metadata.file}: {name}.attention.causal: expected false, found true", param=f"{name}.attention.causal"
        )
    rows = {}
    for table in ("token_embd", "position_embd"):
        tensor = tensors.get(f"{table}.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise InvalidFileError(f"{metadata.file}: expected a matrix {table}.weight, found none")
        rows[table] = tensor.shape[0]
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": rows["token_embd"],
        "hidden_size": metadata.integer(f"{name}.embedding_length", min=1),
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length", min=1),
        "num_hidden_layers": metadata.integer(f"{name}.block_count", min=1),
        "num_attention_heads": metadata.integer(f"{name}.attention.head_count", min=1),
        "max_position_embeddings": rows["position_embd"],
        "layer_norm_eps": metadata.number(f"{name}.attention.layer_norm_epsilon"),
    }


def encoder_sources(tensors: Iterable[StoredTensor]) -> dict[str, Source]:
    """Return the source of each tensor by its name in a checkpoint folder, without those of a classifier's head.

    A tensor with an unknown name keeps it, so that the network refuses it by this name.
    """
    sources = {}
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor.name)
        layer, part, kind = match.groups() if match else (None, "", "")
        if layer is None and part in HEAD_PARTS:
            continue
        own = (_TOP if layer is None else _LAYER).get(part)
        place = "embeddings" if layer is None else f"encoder.layer.{layer}"
        name = tensor.name if own is None else f"bert.{place}.{own}.{kind}"
        sources[name] = Source(tensor.name, is_row=part == "token_types")
    return sources
