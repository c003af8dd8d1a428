"""Gemma 3n and 4 in GGUF files: two kinds of layers, keys and values shared by later layers, inputs by layer.

The forms are those of llama.cpp's converter (conversion/gemma.py).  Gemma 4 has heads of two sizes, and its
proportional positions as divisors of the frequencies of full layers: 1 where a pair turns, and 1e30 elsewhere.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from penstock.checkpoint.gguf.architectures.architecture import (
    BOTH_NORMS,
    LAYER_NAMES,
    SIZES,
    WINDOW,
    WINDOW_PATTERN,
    Architecture,
    Factors,
    PartSources,
    Tensors,
    Values,
)
from penstock.checkpoint.gguf.architectures.values import window_pattern
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor
from penstock.checkpoint.gguf.rope import ROPE_FACTORS
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.config import show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["SHARED_KV"]

_CAP: Final = "final_logit_softcapping"
_INPUT_LENGTH: Final = "embedding_length_per_layer_input"
_TABLE: Final = "per_layer_token_embd.weight"
_SPARSITY: Final = "activation_sparsity_scale"
_LOCAL_BASE: Final = "rope.freq_base_swa"
_GEMMA_3N_OWN: Final = 20
"""Layers of Gemma 3n with keys and values of their own, where a file does not say the number of the others."""
_UNREAD: Final = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
"""Tensors that a file may have in layers that read the keys and values of others."""
_NO_TURN: Final = 1e20
_MAX_EXPERTS: Final = 4096
_KEYS: Final = (
    WINDOW, WINDOW_PATTERN, "attention.shared_kv_layers", _INPUT_LENGTH, _CAP, _LOCAL_BASE,
)  # fmt: skip
_TOP: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_NAMES: Final = {
    **LAYER_NAMES,
    **BOTH_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


def _read_shared(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return what both families have."""
    if not metadata.integer(f"{name}.{WINDOW}", 0):
        raise metadata.error(f"{name}.{WINDOW}", "a window in tokens")
    num_layers, key = values["num_hidden_layers"], f"{name}.{_INPUT_LENGTH}"
    table = tensors.get(_TABLE)
    cap = {_CAP: metadata.number(f"{name}.{_CAP}")} if f"{name}.{_CAP}" in metadata.values else {}
    return {
        **window_pattern(metadata, f"{name}.{WINDOW_PATTERN}", num_layers),
        **cap,
        "hidden_size_per_layer_input": metadata.integer(key, 0),
        "vocab_size_per_layer_input": values["vocab_size"] if table is None else table.shape[0],
    }


def _gemma_3n(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    num_layers, laurel = values["num_hidden_layers"], tensors.get("blk.0.laurel_l.weight")
    widths = f"{name}.feed_forward_length"
    if laurel is None:
        raise InvalidFileError(
            f"{metadata.file}: expected a matrix blk.0.laurel_l.weight, got none", param="blk.0.laurel_l.weight"
        )
    return _read_shared(metadata, name, values, tensors) | {
        "num_key_value_heads": metadata.integer(f"{name}.attention.head_count_kv", min=1),
        "intermediate_size": metadata.integers(widths, num_layers)
        if isinstance(metadata.values.get(widths), np.ndarray)
        else metadata.integer(widths, min=1),
        "rope_local_base_freq": metadata.number(f"{name}.{_LOCAL_BASE}", 10000.0),
        "num_kv_shared_layers": _num_shared(metadata, name),
        "altup_active_idx": metadata.integer(f"{name}.altup.active_idx", 0),
        "altup_num_inputs": metadata.integer(f"{name}.altup.num_inputs", 4),
        "laurel_rank": laurel.shape[0],
        **_sparsity(metadata, f"{name}.{_SPARSITY}", num_layers),
    }


def _sparsity(metadata: Metadata, key: str, num_layers: int) -> dict[str, Any]:
    """Return the share of gates that are 0, of which a file has the standard deviations; minus infinity is none."""
    scales = metadata.values.get(key)
    if scales is None:
        return {}
    is_list = isinstance(scales, np.ndarray) and scales.dtype.kind == "f" and len(scales) == num_layers
    if not isinstance(scales, np.ndarray) or not is_list or np.isnan(scales).any() or (scales == np.inf).any():
        raise metadata.error(key, f"an array of {num_layers} numbers")
    shares = [0.0 if scale == -math.inf else NormalDist().cdf(scale) for scale in scales.tolist()]
    return {"activation_sparsity_pattern": [round(share, 6) for share in shares]}


def _gemma_4(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    num_layers = values["num_hidden_layers"]
    result = _read_shared(metadata, name, values, tensors)
    kinds = result.get("layer_types")
    if kinds is None:
        raise metadata.error(f"{name}.{WINDOW_PATTERN}", f"an array of {num_layers} booleans")
    for kind, end in (("full_attention", ""), ("sliding_attention", "_swa")):
        length = metadata.integer(f"{name}.attention.key_length{end}", min=1)
        for key in (f"{name}.attention.value_length{end}", f"{name}.rope.dimension_count{end}"):
            if metadata.integer(key, length) != length:
                raise metadata.error(key, f"{length}, the length of a key in layers of {kind}")
    full = kinds.index("full_attention") if "full_attention" in kinds else num_layers - 1
    return result | {
        **_gemma_4_heads(metadata, f"{name}.attention.head_count_kv", kinds),
        **_gemma_4_widths(metadata, f"{name}.feed_forward_length", num_layers),
        "head_dim": metadata.integer(f"{name}.attention.key_length_swa", min=1),
        "global_head_dim": metadata.integer(f"{name}.attention.key_length", min=1),
        "num_kv_shared_layers": _num_shared(metadata, name),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        **_gemma_4_experts(metadata, name, tensors),
    }


def _gemma_4_heads(metadata: Metadata, key: str, kinds: list[str]) -> dict[str, Any]:
    """Return the number of heads of keys and values in layers with windows and in full ones."""
    if not isinstance(metadata.values.get(key), np.ndarray):
        return {"num_key_value_heads": metadata.integer(key, min=1)}
    counts = metadata.integers(key, len(kinds)) or []
    by_kind = {kind: {count for own, count in zip(kinds, counts, strict=True) if own == kind} for kind in set(kinds)}
    if min(counts) < 1 or any(len(sizes) > 1 for sizes in by_kind.values()):
        raise metadata.error(key, "the same number of heads, at least 1, in all layers of a kind")
    heads = {kind: sizes.pop() for kind, sizes in by_kind.items()}
    full = heads.get("full_attention", counts[0])
    return {"num_key_value_heads": heads.get("sliding_attention", full), "num_global_key_value_heads": full}


def _gemma_4_widths(metadata: Metadata, key: str, num_layers: int) -> dict[str, Any]:
    """Return the width of feed-forward layers, which may be double in the layers without keys of their own."""
    if not isinstance(metadata.values.get(key), np.ndarray):
        return {"intermediate_size": metadata.integer(key, min=1)}
    widths = metadata.integers(key, num_layers) or []
    if widths[0] < 1 or not set(widths) <= {widths[0], 2 * widths[0]}:
        raise metadata.error(key, f"one width, or its double, in all layers, such as {widths[0]}")
    return {"intermediate_size": widths[0], "use_double_wide_mlp": 2 * widths[0] in widths}


def _gemma_4_experts(metadata: Metadata, name: str, tensors: Tensors) -> dict[str, Any]:
    count = metadata.integer(f"{name}.expert_count", 0, max=_MAX_EXPERTS)
    if not count:
        return {}
    down = tensors.get("blk.0.ffn_down_exps.weight")
    if down is None or len(down.shape) != 3:
        raise InvalidFileError(
            f"{metadata.file}: expected matrices blk.0.ffn_down_exps.weight, got none",
            param="blk.0.ffn_down_exps.weight",
        )
    key = f"{name}.expert_feed_forward_length"
    if metadata.integer(key, down.shape[2]) != down.shape[2]:
        raise metadata.error(key, f"{down.shape[2]}, the columns of {down.name}")
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": metadata.integer(f"{name}.expert_used_count", min=1),
        "moe_intermediate_size": down.shape[2],
    }


def _plain_rope(metadata: Metadata, name: str, values: Values, factors: Factors) -> dict[str, Any]:
    """Refuse positions with a scaling."""
    key = f"{name}.rope.scaling.type"
    if factors or (key in metadata.values and metadata.text(key) != "none"):
        actual = next(iter(factors)) if factors else metadata.text(key)
        raise UnsupportedError(f"{metadata.file}: {key}: expected none, got {show(actual)}", param=key)
    return {}


def _proportional_rope(metadata: Metadata, name: str, values: Values, factors: Factors) -> dict[str, Any]:
    """Return the positions of both kinds of layers: in full ones only the first pairs turn."""
    _plain_rope(metadata, name, values, {own: factor for own, factor in factors.items() if own != ROPE_FACTORS})
    num_pairs = values["global_head_dim"] // 2
    divisors = factors.get(ROPE_FACTORS, np.ones(num_pairs, np.float32))
    turning = int((divisors == 1).sum())
    if len(divisors) != num_pairs or not (divisors[:turning] == 1).all() or (divisors[turning:] < _NO_TURN).any():
        raise UnsupportedError(
            f"{metadata.file}: tensor {ROPE_FACTORS}: expected {num_pairs} numbers, 1 and then 1e30, got others",
            param=ROPE_FACTORS,
        )
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": turning / num_pairs,
        "rope_theta": values["rope_theta"],
    }
    local = {"rope_type": "default", "rope_theta": metadata.number(f"{name}.{_LOCAL_BASE}", 10000.0)}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _num_shared(metadata: Metadata, name: str) -> int:
    """Return the number of layers, the last ones, that read the keys and values of others."""
    num_layers = metadata.integer(f"{name}.block_count", min=1)
    default = max(num_layers - _GEMMA_3N_OWN, 0) if name == "gemma3n" else 0
    return metadata.integer(f"{name}.attention.shared_kv_layers", default, max=num_layers)


def _layer_parts(metadata: Metadata, name: str) -> PartSources:
    """Return what finds the factors of experts, of which a tensor has all, and what shared layers do not compute."""
    first_shared = metadata.integer(f"{name}.block_count", min=1) - _num_shared(metadata, name)

    def sources(tensor: StoredTensor, part: str) -> dict[str, GgufSource] | None:
        if part in _UNREAD and int(tensor.name.split(".")[1]) >= first_shared:
            return {}
        if part != "ffn_down_exps.scale":
            return None
        count = metadata.integer(f"{name}.expert_count", 0, max=_MAX_EXPERTS)
        if tensor.shape != (count,):
            raise InvalidFileError(
                f"{metadata.file}: tensor {tensor.name}: expected {count} numbers, got the shape {list(tensor.shape)}",
                param=tensor.name,
            )
        return {
            f"router.{expert}.per_expert_scale.weight": GgufSource(
                tensor.name, rows=((expert, expert + 1),), is_row=True
            )
            for expert in range(count)
        }

    return sources


SHARED_KV: Final[dict[str, Architecture]] = {
    "gemma3n": Architecture(
        "gemma3n_text",
        read=_gemma_3n,
        read_rope=_plain_rope,
        read_parts=_layer_parts,
        layer_names={
            **_NAMES,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        keys=(*_KEYS, _SPARSITY, "altup.active_idx", "altup.num_inputs"),
        is_own_form=True,
        top_names=_TOP,
        has_own_heads=True,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        read=_gemma_4,
        read_rope=_proportional_rope,
        read_parts=_layer_parts,
        layer_names={
            **_NAMES,
            "layer_output_scale": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp_s": "router.scale",
            "ffn_gate_exps": "experts.{}.gate_proj",
            "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps": "experts.{}.down_proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        keys=(
            *_KEYS, *SIZES, "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
        ),
        is_own_form=True,
        top_names=_TOP,
        has_own_heads=True,
        may_have_experts=True,
    ),
}  # fmt: skip
