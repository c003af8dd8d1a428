"""BERT, XLM-RoBERTa, Nomic BERT and ModernBERT in GGUF files, as llama.cpp's converter (conversion/bert.py) has them.

The file has no pooler and no masked-language head.  The table of positions of RoBERTa begins with that of the first
token, so that the network is the same as BERT's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["ENCODERS", "HEAD_PARTS", "encoder_sources", "encoder_values"]

HEAD_PARTS: Final = ("cls", "cls.output")
"""Linears of a classifier's head, which the pooling head has."""

_KEYS: Final = (
    "attention.causal", "attention.head_count", "attention.layer_norm_epsilon", "block_count", "context_length",
    "embedding_length", "feed_forward_length", "pooling_type", "vocab_size",
)  # fmt: skip
_TENSOR: Final = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?([a-z_]+(?:\.output)?)\.(weight|bias)")


@dataclass(frozen=True)
class _Encoder:
    """An architecture: ``keys`` that it has beside those of all, and its modules outside and in layers.

    ``read`` returns the values of config.json that only this architecture has.
    """

    model_type: str
    keys: tuple[str, ...]
    top: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    read: Callable[[Metadata, str], dict[str, Any]] = lambda _metadata, _name: {}


_HIDDEN_ACT: Final = "hidden_activation"
_WINDOW: Final = "attention.sliding_window"


def _modern_bert(metadata: Metadata, name: str) -> dict[str, Any]:
    """Return the windows, the activation and the rotary positions of both kinds of layers."""
    key = f"{name}.rope.scaling.type"
    if metadata.text(key, "none") != "none":
        raise UnsupportedError(f"{metadata.file}: {key}: expected none, got {show(metadata.text(key))}", param=key)
    return {
        "norm_eps": metadata.number(f"{name}.attention.layer_norm_epsilon"),
        "local_attention": metadata.integer(f"{name}.{_WINDOW}", min=1),
        "global_attn_every_n_layers": metadata.integer(f"{name}.{_WINDOW}_pattern", 3, min=1),
        "global_rope_theta": metadata.number(f"{name}.rope.freq_base"),
        "local_rope_theta": metadata.number(f"{name}.rope.freq_base_swa", 10000.0),
        "hidden_activation": metadata.text(f"{name}.{_HIDDEN_ACT}", "gelu"),
    }


_ENCODERS: Final = {
    "bert": _Encoder(
        "bert",
        ("classifier.output_labels",),
        {
            "token_embd": "bert.embeddings.word_embeddings",
            "position_embd": "bert.embeddings.position_embeddings",
            "token_types": "bert.embeddings.token_type_embeddings",
            "token_embd_norm": "bert.embeddings.LayerNorm",
        },
        "bert.encoder.layer",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic-bert": _Encoder(
        "nomic_bert",
        ("rope.freq_base",),
        {
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
        },
        "encoder.layers",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
    ),
    "modern-bert": _Encoder(
        "modernbert",
        (
            "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", _HIDDEN_ACT, _WINDOW, f"{_WINDOW}_pattern",
        ),
        {
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
        },
        "model.layers",
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        _modern_bert,
    ),
}  # fmt: skip
ENCODERS: Final = {name: encoder.model_type for name, encoder in _ENCODERS.items()}
"""The model_type of each architecture."""
_CLASSES: Final = {"bert": "BertModel", "nomic-bert": "NomicBertModel", "modern-bert": "ModernBertModel"}


def encoder_values(metadata: Metadata, name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the values of config.json; UnsupportedError for a key that is not read."""
    encoder = _ENCODERS[name]
    for key in metadata.values:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in (*_KEYS, *encoder.keys):
            raise UnsupportedError(f"{metadata.file}: {ascii(key)[1:-1]} is not supported", param=key)
    if metadata.flag(f"{name}.attention.causal", False):
        raise UnsupportedError(
            f"{metadata.file}: {name}.attention.causal: expected false, got true", param=f"{name}.attention.causal"
        )
    rows = {}
    for table in ("token_embd", "position_embd"):
        if table not in encoder.top:
            continue
        tensor = tensors.get(f"{table}.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise InvalidFileError(
                f"{metadata.file}: expected a matrix {table}.weight, got none", param=f"{table}.weight"
            )
        rows[table] = tensor.shape[0]
    context_len = (
        rows["position_embd"] if "position_embd" in rows else metadata.integer(f"{name}.context_length", min=1)
    )
    rope = (
        {"rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0)} if "rope.freq_base" in encoder.keys else {}
    )
    return {
        "model_type": encoder.model_type,
        "architectures": [_CLASSES[name]],
        "vocab_size": rows["token_embd"],
        "hidden_size": metadata.integer(f"{name}.embedding_length", min=1),
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length", min=1),
        "num_hidden_layers": metadata.integer(f"{name}.block_count", min=1),
        "num_attention_heads": metadata.integer(f"{name}.attention.head_count", min=1),
        "max_position_embeddings": context_len,
        "layer_norm_eps": metadata.number(f"{name}.attention.layer_norm_epsilon"),
        **rope,
        **encoder.read(metadata, name),
    }


def encoder_sources(name: str, tensors: Iterable[StoredTensor]) -> dict[str, GgufSource]:
    """Return the source of each tensor by its name in a checkpoint folder, without those of a classifier's head.

    A tensor with an unknown name keeps it, so that the network refuses it by this name.
    """
    encoder, sources = _ENCODERS[name], {}
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor.name)
        layer, part, kind = match.groups() if match else (None, "", "")
        if layer is None and part in HEAD_PARTS and "classifier.output_labels" in encoder.keys:
            continue
        own = (encoder.top if layer is None else encoder.layer).get(part)
        place = "" if layer is None else f"{encoder.layers}.{layer}."
        stored = tensor.name if own is None else f"{place}{own}.{kind}"
        sources[stored] = GgufSource(tensor.name, is_row=part == "token_types")
    return sources
