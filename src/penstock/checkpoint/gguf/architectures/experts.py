"""Decoders with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.checkpoint.gguf.architectures.architecture import (
    GRANITE_FACTORS,
    SHARED,
    SIZES,
    WINDOW,
    Architecture,
    expert_names,
    shared_names,
    with_dense,
)
from penstock.checkpoint.gguf.architectures.dense import DENSE
from penstock.checkpoint.gguf.architectures.routing import (
    ROUTING_KEYS,
    ernie_4_5_moe,
    glm_4_moe,
    hunyuan_moe,
    minimax_m_2,
)
from penstock.checkpoint.gguf.architectures.values import window_or_none

__all__ = ["EXPERTS", "MIXTRAL"]

EXPERTS: Final[dict[str, Architecture]] = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        layer_names={**expert_names("mlp"), **SHARED},
        keys=(*SIZES, "expert_shared_feed_forward_length"),
        constants={"norm_topk_prob": False},
        num_experts="num_experts",
        biases={},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        layer_names=expert_names("mlp"),
        keys=SIZES,
        constants={"norm_topk_prob": True},
        num_experts="num_experts",
    ),
    "olmoe": Architecture(
        "olmoe",
        layer_names=expert_names("mlp"),
        keys=SIZES,
        constants={"norm_topk_prob": False},
        num_experts="num_experts",
        expert_size="intermediate_size",
    ),
    "granitemoe": Architecture(
        "granitemoe",
        has_pairs=True,
        layer_names=expert_names("block_sparse_moe"),
        factors=GRANITE_FACTORS,
        keys=SIZES,
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        is_own_form=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        read=window_or_none,
        layer_names={
            **expert_names("mlp", ("gate_up_proj", "gate_up_proj", "down_proj")),
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys=(*SIZES, WINDOW),
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        alternates={"ffn_gate_exps": "ffn_up_exps"},
        is_own_form=True,
        scaling_constants={"truncate": False},
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        read=ernie_4_5_moe,
        layer_names={
            **with_dense(expert_names("mlp")),
            **shared_names("mlp.shared_experts"),
            "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
        },
        keys=(*ROUTING_KEYS, *SIZES, "expert_shared_feed_forward_length", "interleave_moe_layer_step"),
        num_experts="moe_num_experts",
        is_own_form=True,
        biases={"use_bias": "attn_q"},
        own_keys={"num_experts_per_tok": "moe_k"},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        read=hunyuan_moe,
        layer_names={
            **expert_names("mlp"),
            **shared_names("mlp.shared_mlp"),
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
        },
        keys=(*SIZES, "expert_shared_count", "expert_shared_feed_forward_length"),
        num_experts="num_experts",
        expert_size="intermediate_size",
        own_keys={"num_experts_per_tok": "moe_topk"},
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        read=glm_4_moe,
        layer_names={
            **with_dense(expert_names("mlp")),
            **shared_names("mlp.shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        keys=(*ROUTING_KEYS, *SIZES),
        num_experts="n_routed_experts",
        rotates_in_part=True,
        has_extra_layers=True,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        read=minimax_m_2,
        layer_names={
            **expert_names("block_sparse_moe", ("w1", "w3", "w2")),
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
        },
        keys=(*SIZES, "expert_gating_func"),
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        rotates_in_part=True,
        biases={},
    ),
}

MIXTRAL: Final = replace(
    DENSE["llama"],
    model_type="mixtral",
    layer_names=expert_names("block_sparse_moe", ("w1", "w3", "w2")),
    num_experts="num_local_experts",
    expert_size="intermediate_size",
)
"""Architecture llama, if the number of experts is not 0."""
