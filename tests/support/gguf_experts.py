"""Small random models with experts of DeepSeek's kind or latent attention as GGUF files, as llama.cpp writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from tests.support.gguf_models import COUNTS, EXPERTS, HALF, THETA, Family

__all__ = ["EXPERT_FAMILIES"]

SPARSE = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"n_shared_experts": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 2, "topk_group": 1}
SPARSE_KEYS: dict[str, Any] = {
    **COUNTS, "leading_dense_block_count": 1, "expert_feed_forward_length": 32, "expert_shared_count": 2,
    "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_group_count": 2, "expert_group_used_count": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
          "head_dim": 8, "num_key_value_heads": 4, "pad_token_id": 0}  # fmt: skip
RANK_KEYS = {"attention.q_lora_rank": 24, "attention.kv_lora_rank": 40, "rope.dimension_count": 8, "vocab_size": 300}
LATENT_KEYS = {
    **RANK_KEYS, "attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 40,
    "attention.key_length_mla": 20, "attention.value_length_mla": 20,
}  # fmt: skip
WHOLE_KEYS = {
    **RANK_KEYS, "attention.head_count_kv": 4, "attention.key_length": 20, "attention.value_length": 20,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
        "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
LLAMA_4_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
YARN_KEYS: dict[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_log_multiplier": 0.0707, "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}  # fmt: skip
DIRECT = {key: value for key, value in LATENT_KEYS.items() if key != "attention.q_lora_rank"}
SOFTMAX = {key: value for key, value in SPARSE_KEYS.items() if "group" not in key and "norm" not in key}


def _halves(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return the key half of kv_b_proj, transposed for each head, and the value half."""
    if not name.endswith("kv_b_proj.weight"):
        return {}
    rows, block = array.reshape(4, 12 + 20, 40), f"blk.{name.split('.')[2]}"
    keys = np.ascontiguousarray(rows[:, :12].swapaxes(1, 2))
    return {f"{block}.attn_k_b.weight": keys, f"{block}.attn_v_b.weight": np.ascontiguousarray(rows[:, 12:])}


def _fused(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return gate and up of the experts as one tensor, and the halves of kv_b_proj."""
    if name.endswith("experts.gate_up_proj"):
        return {f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight": array}
    return _halves(name, array)


EXPERT_FAMILIES = {
    "ernie4_5-moe": Family(
        "Ernie4_5_Moe",
        gguf.MODEL_ARCH.ERNIE4_5_MOE,
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, **THETA},
        {**COUNTS, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1, "expert_shared_count": 2,
         "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 48},
    ),
    "hunyuan-moe": Family(
        "HunYuanMoEV1",
        gguf.MODEL_ARCH.HUNYUAN_MOE,
        {"num_experts": 4, "moe_topk": 2, **THETA},
        {**COUNTS, "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96, "expert_shared_count": 1},
    ),
    "glm4moe": Family(
        "Glm4Moe",
        gguf.MODEL_ARCH.GLM4_MOE,
        {**SPARSE, **SHARED, **HALF, "attention_bias": True, "use_qk_norm": True, "pad_token_id": 0},
        {**SPARSE_KEYS, "expert_gating_func": 2, "rope.dimension_count": 8},
    ),
    "minimax-m2": Family(
        "MiniMaxM2",
        gguf.MODEL_ARCH.MINIMAXM2,
        {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {**COUNTS, "expert_feed_forward_length": 96, "expert_gating_func": 2, "rope.dimension_count": 8},
    ),
    "deepseek2": Family(
        "DeepseekV3",
        gguf.MODEL_ARCH.DEEPSEEK2,
        {**SPARSE, **SHARED, **LATENT, "rope_parameters": YARN},
        {**SPARSE_KEYS, **LATENT_KEYS, **YARN_KEYS, "expert_gating_func": 2},
        forms=_halves,
    ),
    "deepseek2 with queries in one step": Family(
        "DeepseekV3",
        gguf.MODEL_ARCH.DEEPSEEK2,
        {**SPARSE, **SHARED, **LATENT, **THETA, "q_lora_rank": None},
        {**SPARSE_KEYS, **DIRECT, "expert_gating_func": 2},
        forms=_fused,
    ),
    "deepseek2 with a softmax": Family(
        "DeepseekV2",
        gguf.MODEL_ARCH.DEEPSEEK2,
        {**SPARSE, **SHARED, **LATENT, **THETA, "norm_topk_prob": False, "topk_method": "greedy"},
        {**SOFTMAX, **WHOLE_KEYS},
    ),
    "mistral4": Family(
        "Mistral4",
        gguf.MODEL_ARCH.MISTRAL4,
        {**SPARSE, **SHARED, **LATENT, "head_dim": 20, "rope_parameters": LLAMA_4_YARN},
        {**SPARSE_KEYS, **LATENT_KEYS, **YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.1},
        forms=_fused,
    ),
    "minicpm3": Family("MiniCPM3", gguf.MODEL_ARCH.MINICPM3, {**LATENT, **THETA, "v_head_dim": 16},
                       {**WHOLE_KEYS, "attention.value_length": 16}),
}  # fmt: skip
