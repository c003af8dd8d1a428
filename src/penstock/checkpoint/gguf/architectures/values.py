"""The values of config.json that only some architectures have, by the name of the architecture."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from penstock.checkpoint.gguf.architectures.architecture import CAPS, WINDOW, WINDOW_PATTERN, Tensors, Values
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.config import show
from penstock.errors import UnsupportedError

__all__ = [
    "apertus", "baichuan", "command_r", "eurobert", "falcon", "gemma_2", "gemma_3", "gpt_neox", "kv_heads", "lfm_2",
    "minicpm", "olmo", "olmo_3", "window_or_none", "window_pattern", "xielu",
]  # fmt: skip

_LARGE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
"""The number of layers of the 27B models: only their scores are divided by the root of hidden_size / heads."""

_BAICHUAN_13B_LAYERS: Final = 40
_OLMO_EPS: Final = 1e-5
"""The epsilon of the norms of OLMo 1, which no key of config.json changes."""


def kv_heads(metadata: Metadata, name: str, *, some_without: bool = False) -> list[int]:
    """Return the number of heads of keys and values: one for all layers, or of each layer.

    ``some_without``: layers may have 0, which is one without attention.
    """
    key = f"{name}.attention.head_count_kv"
    if not isinstance(metadata.values.get(key), np.ndarray):
        return [metadata.integer(key, metadata.integer(f"{name}.attention.head_count", min=1), min=1)]
    counts = metadata.integers(key, metadata.integer(f"{name}.block_count", min=1)) or []
    if max(counts) < 1 or any(count not in (0, max(counts)) for count in counts):
        raise metadata.error(key, "the same number of heads in all layers that have attention")
    if 0 in counts and not some_without:
        raise metadata.error(key, "a number of heads in every layer")
    return counts


def gemma_2(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the scale of queries and the caps of scores and logits."""
    if not metadata.integer(f"{name}.{WINDOW}", 0):
        raise metadata.error(f"{name}.{WINDOW}", "a window in tokens")
    is_large = values["num_hidden_layers"] == _LARGE_GEMMAS.get(name)
    per_head = values["hidden_size"] / values["num_attention_heads"]
    result: dict[str, Any] = {"query_pre_attn_scalar": per_head if is_large else values["head_dim"]}
    for cap in CAPS:
        if f"{name}.{cap}" in metadata.values:
            result[cap] = metadata.number(f"{name}.{cap}") or None
    return result


def gemma_3(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the same, with the windows and the rotary frequency of local layers."""
    local = metadata.number(f"{name}.rope.freq_base_swa", 10000.0)
    pattern = window_pattern(metadata, f"{name}.{WINDOW_PATTERN}", values["num_hidden_layers"])
    return gemma_2(metadata, name, values, tensors) | {"rope_local_base_freq": local} | pattern


def window_or_none(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the window, null without one, and which layers have it if the file says so."""
    if not (window := metadata.integer(f"{name}.{WINDOW}", 0)):
        return {"sliding_window": None}
    pattern = window_pattern(metadata, f"{name}.{WINDOW_PATTERN}", values["num_hidden_layers"])
    return {"sliding_window": window, **pattern}


def lfm_2(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the kinds of layers and the length of the convolution."""
    kinds = ["full_attention" if count else "conv" for count in kv_heads(metadata, name, some_without=True)]
    return {
        "layer_types": kinds if len(kinds) > 1 else kinds * values["num_hidden_layers"],
        "norm_eps": values["rms_norm_eps"],
        "conv_L_cache": metadata.integer(f"{name}.shortconv.l_cache", min=1),
    }


def minicpm(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the two factors that the file has in another form."""
    logits = metadata.number(f"{name}.logit_scale")
    if logits <= 0:
        raise metadata.error(f"{name}.logit_scale", "a number above 0")
    return {
        "scale_depth": metadata.number(f"{name}.residual_scale") * math.sqrt(values["num_hidden_layers"]),
        "dim_model_base": values["hidden_size"] / logits,
    }


def gpt_neox(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return whether attention and feed-forward read the same rows."""
    return {"use_parallel_residual": metadata.flag(f"{name}.use_parallel_residual", True)}


def command_r(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return whether queries and keys have norms."""
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


def olmo(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the limit on queries, keys and values."""
    if values["rms_norm_eps"] != _OLMO_EPS:
        raise metadata.error(f"{name}.attention.layer_norm_epsilon", f"{_OLMO_EPS}")
    key = f"{name}.attention.clamp_kqv"
    return {"clip_qkv": metadata.number(key)} if key in metadata.values else {}


def falcon(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the form with a key and a value for each group of heads, of which the 7B form with one group is a case."""
    num_norms = 2 if "blk.0.attn_norm_2.weight" in tensors else 1
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": values["num_key_value_heads"],
        "num_ln_in_parallel_attn": num_norms,
    }


def window_pattern(metadata: Metadata, key: str, num_layers: int) -> dict[str, Any]:
    """Return which layers have windows: by the period of the others, or of each layer."""
    pattern = metadata.values.get(key)
    if pattern is None:
        return {}
    if not isinstance(pattern, np.ndarray):
        return {"sliding_window_pattern": metadata.integer(key, min=1)}
    if pattern.dtype.kind != "b" or len(pattern) != num_layers:
        raise metadata.error(key, f"a number, or an array of {num_layers} booleans")
    return {"layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in pattern.tolist()]}


def olmo_3(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the windows; UnsupportedError for rotary positions that differ between layers."""
    key, base = f"{name}.rope.scaling.type", f"{name}.rope.freq_base_swa"
    if key in metadata.values and metadata.text(key) != "none":
        raise UnsupportedError(f"{metadata.file}: {key}: expected none, got {show(metadata.text(key))}", param=key)
    if base in metadata.values and metadata.number(base) != values["rope_theta"]:
        raise UnsupportedError(
            f"{metadata.file}: {base}: expected {values['rope_theta']:g}, got {metadata.number(base):g}", param=base
        )
    return window_or_none(metadata, name, values, tensors)


def baichuan(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the form with ALiBi for the 13B models, which have no other mark in a file than their layers."""
    if values["num_hidden_layers"] != _BAICHUAN_13B_LAYERS:
        return {}
    return {"max_position_embeddings": None, "model_max_length": values["max_position_embeddings"]}


def apertus(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return positions without a scaling, which are not the default of config.json."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]}}


def xielu(metadata: Metadata, name: str, num_layers: int) -> dict[str, list[float]]:
    """Return the parameters of the activation, which are keys without the name of the architecture."""
    parameters = {}
    for part in ("alpha_n", "alpha_p", "beta", "eps"):
        key = f"xielu.{part}"
        numbers = metadata.numbers(key, num_layers)
        if numbers is None:
            raise metadata.error(key, f"an array of {num_layers} finite numbers")
        parameters[f"mlp.act_fn.{part}"] = numbers
    return parameters


def eurobert(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Check that attention is to both sides; the table of tokens takes the place of an output head."""
    key = f"{name}.attention.causal"
    if metadata.flag(key, True):
        raise UnsupportedError(f"{metadata.file}: {key}: expected false, got true", param=key)
    return {"tie_word_embeddings": True}
