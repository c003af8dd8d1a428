"""Decoders with multi-head latent attention (MLA).

The forms are those of llama.cpp's converter (conversion/deepseek.py).  Newer files have the halves of ``kv_b_proj`` as
two tensors with a matrix for each head, that of the keys transposed, which are the network's own parameters; their
``attention.key_length`` and ``head_count_kv`` are those of a latent.  Older files have ``attn_kv_b`` as the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from penstock.checkpoint.gguf.architectures.architecture import (
    LAYER_NAMES,
    SIZES,
    Architecture,
    PartSources,
    Tensors,
    Values,
    expert_names,
    shared_names,
    with_dense,
)
from penstock.checkpoint.gguf.architectures.routing import ROUTING_KEYS, SIGMOID, SOFTMAX, check_gating, routing_values
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.reader import StoredTensor, Texts
from penstock.checkpoint.gguf.weights import GgufSource
from penstock.config import OWN_NAMES
from penstock.errors import InvalidFileError

__all__ = ["DEEPSEEK_3", "LATENT", "has_sigmoid_experts"]

_MAX_HEADS: Final = 4096
_KEY_LENGTH, _VALUE_LENGTH = "attention.key_length_mla", "attention.value_length_mla"
_NAMES: Final = {
    **LAYER_NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_GLM_FLASH_LAYERS, _GLM_FLASH_VOCAB = (47, 48), 154880
"""GLM-4.7-Flash, whose first files do not say how experts are chosen."""


def _read_latent(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the sizes of the attention."""
    is_split = f"{name}.{_KEY_LENGTH}" in metadata.values
    key_length = metadata.integer(f"{name}.{_KEY_LENGTH if is_split else 'attention.key_length'}", min=1)
    rope_dim = metadata.integer(f"{name}.rope.dimension_count", min=2, max=key_length - 1)
    value_dim = f"{name}.{_VALUE_LENGTH if is_split else 'attention.value_length'}"
    heads = values["num_attention_heads"]
    ranks = f"{name}.attention.q_lora_rank"
    return {
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "q_lora_rank": metadata.integer(ranks, min=1) if ranks in metadata.values else None,
        "kv_lora_rank": metadata.integer(f"{name}.attention.kv_lora_rank", min=1),
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": metadata.integer(value_dim, values["hidden_size"] // heads, min=1),
        OWN_NAMES: is_split,
    }


def _deepseek(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    is_sigmoid = has_sigmoid_experts(metadata, name)
    check_gating(metadata, name, SIGMOID if is_sigmoid else SOFTMAX)
    result = _read_latent(metadata, name, values, tensors) | routing_values(metadata, name, values)
    if not is_sigmoid and result["n_group"] > 1:
        result["topk_method"] = "group_limited_greedy"
    return result


def _mini_cpm_3(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    return _read_latent(metadata, name, values, tensors) | {
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256.0,
    }


def _mistral_4(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    check_gating(metadata, name, SOFTMAX)
    own = _read_latent(metadata, name, values, tensors) | routing_values(metadata, name, values)
    return own | {"rope_parameters": rope}


def has_sigmoid_experts(metadata: Metadata, name: str) -> bool:
    """Return True if the scores of experts are sigmoids, and False for a softmax."""
    gating = metadata.integer(f"{name}.expert_gating_func", 0)
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    vocab_size = metadata.integer(f"{name}.vocab_size", len(tokens) if isinstance(tokens, (list, Texts)) else 0)
    num_layers = metadata.integer(f"{name}.block_count", min=1)
    is_flash = num_layers in _GLM_FLASH_LAYERS and vocab_size == _GLM_FLASH_VOCAB
    return gating == SIGMOID or (gating == 0 and is_flash)


def _latent_parts(metadata: Metadata, name: str) -> PartSources:
    """Return what finds the network's parameters in newer files; older ones have the tensors of a checkpoint."""
    if f"{name}.{_KEY_LENGTH}" not in metadata.values:
        return lambda tensor, part: None
    heads = metadata.integer(f"{name}.attention.head_count", min=1, max=_MAX_HEADS)
    key_length = metadata.integer(f"{name}.{_KEY_LENGTH}", min=1)
    nope_dim = key_length - metadata.integer(f"{name}.rope.dimension_count", min=2, max=key_length - 1)
    starts = range(0, heads * key_length, key_length)
    queries = {
        "q_nope_proj": tuple((start, start + nope_dim) for start in starts),
        "q_rope_proj": tuple((start + nope_dim, start + key_length) for start in starts),
    }
    halves = {"attn_k_b.weight": "k_up_proj", "attn_v_b.weight": "v_up_proj"}

    def sources(tensor: StoredTensor, part: str) -> dict[str, GgufSource] | None:
        if part in halves:
            return {f"self_attn.{halves[part]}.weight": GgufSource(tensor.name, is_joined=True)}
        if part not in ("attn_q.weight", "attn_q_b.weight"):
            return None
        if len(tensor.shape) != 2 or tensor.shape[0] != heads * key_length:
            raise InvalidFileError(
                f"{metadata.file}: tensor {tensor.name}: expected {heads * key_length} rows, got the shape "
                f"{list(tensor.shape)}",
                param=tensor.name,
            )
        return {f"self_attn.{own}.weight": GgufSource(tensor.name, rows=rows) for own, rows in queries.items()}

    return sources


LATENT: Final[dict[str, Architecture]] = {
    "deepseek2": Architecture(
        "deepseek_v2",
        read=_deepseek,
        read_parts=_latent_parts,
        layer_names={
            **_NAMES,
            **with_dense(expert_names("mlp")),
            **shared_names("mlp.shared_experts"),
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        keys=(
            *ROUTING_KEYS, *SIZES, "attention.kv_lora_rank", "attention.q_lora_rank",
            "rope.scaling.yarn_log_multiplier", _KEY_LENGTH, _VALUE_LENGTH,
        ),
        num_experts="n_routed_experts",
        biases={},
        has_extra_layers=True,
        has_own_heads=True,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        read=_mini_cpm_3,
        layer_names=_NAMES,
        keys=("attention.kv_lora_rank", "attention.q_lora_rank"),
        biases={},
        has_own_heads=True,
    ),
}  # fmt: skip
DEEPSEEK_3: Final = replace(LATENT["deepseek2"], model_type="deepseek_v3")
"""Architecture deepseek2, if the scores of experts are sigmoids."""
LATENT["mistral4"] = replace(
    LATENT["deepseek2"],
    model_type="mistral4",
    read=_mistral_4,
    own_keys={"rope_scaling": "rope_parameters"},
    scaling_constants={"mscale": 1.0, "llama_4_scaling_beta": 0.1},
)
