"""The choice of experts of a GGUF file, in the names of config.json."""

from __future__ import annotations

from typing import Any, Final

from penstock.checkpoint.gguf.architectures.architecture import Tensors, Values
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.errors import UnsupportedError

__all__ = [
    "ROUTING_KEYS", "SIGMOID", "SOFTMAX", "check_gating", "ernie_4_5_moe", "glm_4_moe", "hunyuan_moe", "minimax_m_2",
    "routing_values", "shared_count",
]  # fmt: skip

ROUTING_KEYS: Final = (
    "expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_shared_count",
    "expert_weights_norm", "expert_weights_scale", "leading_dense_block_count",
)  # fmt: skip
SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``; 0 is the architecture's default."""


def check_gating(metadata: Metadata, name: str, gating: int) -> None:
    """Refuse another function of the scores of experts than ``gating``."""
    key = f"{name}.expert_gating_func"
    if metadata.integer(key, 0) not in (0, gating):
        raise UnsupportedError(
            f"{metadata.file}: {key}: expected {gating}, got {metadata.integer(key)}", param="expert_gating_func"
        )


def shared_count(metadata: Metadata, name: str, values: Values, expert_size: str) -> int:
    """Return the number of shared experts, by the rows of their tensor."""
    key, width = f"{name}.expert_shared_count", values.get("shared_expert_intermediate_size", 0)
    count, rest = divmod(width, values[expert_size])
    if rest or metadata.integer(key, count) != count:
        raise metadata.error(key, f"{count}, the rows of the shared experts")
    return int(count)


def routing_values(metadata: Metadata, name: str, values: Values) -> dict[str, Any]:
    """Return the values of DeepSeek's experts, which later families have too."""
    return {
        "n_shared_experts": shared_count(metadata, name, values, "moe_intermediate_size"),
        "first_k_dense_replace": metadata.integer(f"{name}.leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number(f"{name}.expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": metadata.flag(f"{name}.expert_weights_norm", False),
        "n_group": metadata.integer(f"{name}.expert_group_count", 0) or 1,
        "topk_group": metadata.integer(f"{name}.expert_group_used_count", 0) or 1,
    }


def glm_4_moe(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return the values of the experts, and whether queries and keys have norms."""
    check_gating(metadata, name, SIGMOID)
    return routing_values(metadata, name, values) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}


def ernie_4_5_moe(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Return which layers have experts, and the number of shared ones."""
    check_gating(metadata, name, SOFTMAX)
    return {
        "moe_layer_start_index": metadata.integer(f"{name}.leading_dense_block_count", 0),
        "moe_layer_interval": metadata.integer(f"{name}.interleave_moe_layer_step", 1, min=1),
        "moe_num_shared_experts": shared_count(metadata, name, values, "moe_intermediate_size"),
    }


def hunyuan_moe(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Check that there is one shared expert."""
    return {"num_shared_expert": shared_count(metadata, name, values, "intermediate_size")}


def minimax_m_2(metadata: Metadata, name: str, values: Values, tensors: Tensors) -> dict[str, Any]:
    """Check how the experts are chosen."""
    check_gating(metadata, name, SIGMOID)
    return {}
