"""What config.json says, and the names of the tensors, from a GGUF file of an architecture that Penstock runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.weights import Source
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["ROPE_FACTORS", "config_values", "tensor_sources"]

ROPE_FACTORS: Final = "rope_freqs.weight"
_FACTOR_TOLERANCE: Final = 1e-5
_LLAMA3_CONTEXT: Final = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0

_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR: Final = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True)
class _Architecture:
    """A value of general.architecture.

    ``has_pairs``: the file has the rows of q and k in adjacent pairs.  ``names``: names of a layer's tensors that
    differ from Llama's.  ``factors``: keys of numbers that the architecture must have, with their names in config.json.
    ``has_window``: the file may have a sliding window.
    """

    model_type: str
    has_pairs: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, str] = field(default_factory=dict)
    has_window: bool = False


_ARCHITECTURES: Final = {
    "llama": _Architecture("llama", has_pairs=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "phi3": _Architecture(
        "phi3", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, has_window=True
    ),
    "granite": _Architecture(
        "granite",
        has_pairs=True,
        factors={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
        },
    ),
}
_WINDOW: Final = "attention.sliding_window"
_KNOWN_KEYS: Final = frozenset((
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "expert_count",
    "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "vocab_size",
))  # fmt: skip
"""Keys of an architecture that are read.  Others may change the computation, so they are refused."""


def _architecture(metadata: Metadata) -> tuple[str, _Architecture]:
    name = metadata.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{metadata.file}: general.architecture: expected one of {', '.join(_ARCHITECTURES)}, found {show(name)}",
            param="general.architecture",
        )
    return name, _ARCHITECTURES[name]


def config_values(
    metadata: Metadata, tensors: Mapping[str, StoredTensor], rope_factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """Return the values of config.json.  ``rope_factors``: what each frequency is divided by, or None.

    Raises UnsupportedError for an architecture or a key that Penstock does not know, InvalidFileError for a value.
    """
    name, architecture = _architecture(metadata)
    known = _KNOWN_KEYS.union(architecture.factors, (_WINDOW,) if architecture.has_window else ())
    for key in metadata.values:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            raise UnsupportedError(f"{metadata.file}: {ascii(key)[1:-1]} is not supported", param=key)
    if metadata.integer(f"{name}.expert_count", 0):
        raise UnsupportedError(
            f"{metadata.file}: {name}.expert_count: expected 0 for architecture {name}, found "
            f"{metadata.integer(f'{name}.expert_count')}",
            param=f"{name}.expert_count",
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InvalidFileError(f"{metadata.file}: expected a matrix token_embd.weight, found none")
    hidden_size = metadata.integer(f"{name}.embedding_length", min=1)
    num_heads = metadata.integer(f"{name}.attention.head_count", min=1)
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden_size // num_heads, min=1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{name}.{key}", head_dim) != head_dim:
            raise metadata.error(f"{name}.{key}", f"{head_dim}, the length of a key")
    values: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length", min=1),
        "num_hidden_layers": metadata.integer(f"{name}.block_count", min=1),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(f"{name}.attention.head_count_kv", num_heads, min=1),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{name}.context_length", min=1),
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{name}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if architecture.model_type != "qwen2":
        values["attention_bias"] = "blk.0.attn_q.bias" in tensors
    values |= {own: metadata.number(f"{name}.{key}") for key, own in architecture.factors.items()}
    if window := metadata.integer(f"{name}.{_WINDOW}", 0):
        values["sliding_window"] = window
    scaling = _rope_scaling(metadata, name, values, rope_factors)
    return values if scaling is None else {**values, "rope_scaling": scaling}


def _rope_scaling(
    metadata: Metadata, name: str, values: Mapping[str, Any], factors: NDArray[np.float32] | None
) -> dict[str, Any] | None:
    kind = metadata.text(f"{name}.rope.scaling.type", "none")
    if factors is not None and kind == "none":
        return _llama3_scaling(factors, values, metadata.file)
    if factors is not None or kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{metadata.file}: {name}.rope.scaling.type: expected none, linear or yarn"
            f"{', and none beside ' + ROPE_FACTORS if factors is not None else ''}, found {show(kind)}",
            param=f"{name}.rope.scaling.type",
        )
    if kind == "none":
        factor = metadata.number(f"{name}.rope.scale_linear", 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        key = f"{name}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = metadata.integer(key, min=1)
        if metadata.number(f"{name}.rope.scaling.attn_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{metadata.file}: {name}.rope.scaling.attn_factor: expected 1")
    return scaling


def _llama3_scaling(factors: NDArray[np.float32], values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return Llama 3's scaling whose factors the file has.

    The file has only the result.  The largest factor is that of the scaling; the other parameters are those of every
    published Llama 3 model, and a file with factors of other parameters is refused.
    """
    factor, head_dim = float(factors.max(initial=1.0)), values["head_dim"]
    expected = np.empty(head_dim // 2)
    for index in range(head_dim // 2):
        turns = _LLAMA3_CONTEXT * values["rope_theta"] ** -(2 * index / head_dim) / (2 * math.pi)
        share = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        expected[index] = 1 / ((1 - share) / factor + share)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
        raise UnsupportedError(
            f"{file}: tensor {ROPE_FACTORS}: expected the factors of Llama 3 ({head_dim // 2} of them), found others"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def tensor_sources(metadata: Metadata, tensors: Iterable[StoredTensor]) -> dict[str, Source]:
    """Return the source of each tensor by its name in a checkpoint folder.

    A tensor with an unknown name keeps it, so that the network refuses it by this name.
    """
    name, architecture = _architecture(metadata)
    num_heads = metadata.integer(f"{name}.attention.head_count", min=1)
    heads = {"attn_q": num_heads, "attn_k": metadata.integer(f"{name}.attention.head_count_kv", num_heads, min=1)}
    sources = {}
    for tensor in tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        match = _TENSOR.fullmatch(tensor.name)
        layer, part, kind = match.groups() if match else (None, "", "")
        names = _TOP_NAMES if layer is None else {**_LAYER_NAMES, **architecture.names}
        pair_heads = heads.get(part, 0) if architecture.has_pairs and layer is not None else 0
        if pair_heads and tensor.shape[0] % (2 * pair_heads):
            raise InvalidFileError(
                f"{metadata.file}: tensor {tensor.name}: expected rows of {pair_heads} heads with an even length, "
                f"found {tensor.shape[0]}"
            )
        prefix = "" if layer is None else f"model.layers.{layer}."
        own_name = f"{prefix}{names[part]}.{kind}" if part in names else tensor.name
        sources[own_name] = Source(tensor.name, pair_heads)
    return sources
