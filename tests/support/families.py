"""One row per tiny random network: a family with an odd size or an option.  Adding a model adds rows here."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.marks import mostly_exhaustive, mostly_long
from tests.support.own_references import OWN_REFERENCES, OwnReference

_SMALL: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

_LFM2 = {"num_hidden_layers": 3, "block_multiple_of": 40, "intermediate_size": 210}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_one_kv_head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}),
    "llama_rope_llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_rope_linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama_rope_yarn": ("llama", {"rope_parameters": _YARN}),
    "llama_rope_yarn_whole": ("llama", {"rope_parameters": {**_YARN, "truncate": False, "attention_factor": 1.3}}),
    "mistral_window": ("mistral", {"sliding_window": 33, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_one_kv_head": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "phi3": ("phi3", {"num_key_value_heads": 1, "pad_token_id": 0}),
    "phi3_partial_window": (
        "phi3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            "sliding_window": 33,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "phi3_longrope": (
        "phi3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 128,
                "short_factor": [1.0 + 0.1 * pair for pair in range(15)],
                "long_factor": [2.0 + 0.3 * pair for pair in range(15)],
            },
            "pad_token_id": 0,
        },
    ),
    "olmo": ("olmo", {"num_key_value_heads": 1, "pad_token_id": 0, "clip_qkv": 0.9}),
    "olmo2": ("olmo2", {}),
    "olmo2_tied_biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 20}),
    "olmo3_layer_types": ("olmo3", {"sliding_window": 33, "layer_types": ["full_attention", "sliding_attention"]}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "num_key_value_heads": 1, "pad_token_id": 0}),
    "smollm3_untied_windows": (
        "smollm3",
        {
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "ernie4_5_biases": ("ernie4_5", {"head_dim": 24, "num_key_value_heads": 1, "use_bias": True}),
    "glm": ("glm", {"head_dim": 32, "pad_token_id": 0}),
    "glm_tied_no_bias": (
        "glm",
        {"head_dim": 24, "attention_bias": False, "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "glm4": ("glm4", {"head_dim": 32, "num_key_value_heads": 1, "pad_token_id": 0}),
    "glm4_tied": ("glm4", {"head_dim": 24, "tie_word_embeddings": True, "pad_token_id": 0}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 20, "num_key_value_heads": 1}),
    "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed_oss": ("seed_oss", {"head_dim": 32, "num_key_value_heads": 1}),
    "seed_oss_out_bias": ("seed_oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 32}),
    "hunyuan_v1_dense_alpha": (
        "hunyuan_v1_dense",
        {
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0},
        },
    ),
    "apertus": ("apertus", {"num_key_value_heads": 1, "pad_token_id": 0}),
    "bitnet": ("bitnet", {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_tied_head_dim": (
        "qwen3",
        {"head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "lfm2": ("lfm2", {**_LFM2, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_biases": (
        "lfm2",
        {
            **_LFM2,
            "layer_types": ["conv", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3_biases_windows": (
        "qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

_MIXTURE = {"num_experts_per_tok": 3, "num_hidden_layers": 3, "moe_intermediate_size": 52}

FAMILIES |= {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72}),
    "qwen3_moe": ("qwen3_moe", _MIXTURE | {"num_experts": 9, "head_dim": 32, "mlp_only_layers": [1]}),
    "qwen3_moe_renormalised": (
        "qwen3_moe",
        _MIXTURE | {"num_experts": 6, "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen2_moe": ("qwen2_moe", _MIXTURE | {"num_experts": 7, "shared_expert_intermediate_size": 84}),
    "olmoe": (
        "olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 1, "norm_topk_prob": True}
        | {"clip_qkv": 0.9},
    ),
    "glm4_moe": (
        "glm4_moe",
        _MIXTURE
        | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "head_dim": 24}
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.7},
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 32, "intermediate_size": 44}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 96, "head_dim": 24}
        | {"num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 20, "pad_token_id": 0},
    ),
    "granitemoe": (
        "granitemoe",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44, "num_key_value_heads": 1}
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 52, "moe_num_shared_experts": 2}
        | {"num_hidden_layers": 3, "use_bias": False, "num_key_value_heads": 1},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"num_experts": 6, "moe_topk": 3, "intermediate_size": 52, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "glm4_moe_plain": (
        "glm4_moe",
        _MIXTURE | {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "head_dim": 24},
    ),
}

_DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 20}
_DELTA |= {"linear_value_head_dim": 24, "head_dim": 32, "num_hidden_layers": 4}
_DELTA_TYPES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]

FAMILIES |= {
    "qwen3_next": (
        "qwen3_next",
        _MIXTURE | _DELTA | {"num_experts": 7, "shared_expert_intermediate_size": 84, "mlp_only_layers": [1]},
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        _DELTA | {"num_key_value_heads": 1, "tie_word_embeddings": True, "layer_types": _DELTA_TYPES},
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        _MIXTURE | _DELTA | {"num_experts": 7, "shared_expert_intermediate_size": 84},
    ),
}


_MAMBA: dict[str, Any] = {"mamba_n_heads": 10, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3}
_MAMBA |= {"mamba_chunk_size": 32, "num_key_value_heads": 1}
_FALCON_H1: dict[str, Any] = {"mamba_d_ssm": 240, "mamba_norm_before_gate": False, "key_multiplier": 0.6}
_FALCON_H1 |= {"mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "lm_head_multiplier": 0.4}
_FALCON_H1 |= {"embedding_multiplier": 3.0, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2}
_FALCON_H1 |= {"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8}
_NEMOTRON: dict[str, Any] = {"mamba_num_heads": 32, "mamba_head_dim": 12, "n_groups": 4, "ssm_state_size": 24}
_NEMOTRON |= {"conv_kernel": 4, "chunk_size": 32, "head_dim": 32, "num_key_value_heads": 1, "time_step_min": 1e-9}

FAMILIES |= {
    "granitemoehybrid": (
        "granitemoehybrid",
        _MAMBA
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44, "shared_intermediate_size": 52}
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05}
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "granitemoehybrid_dense_rope": (
        "granitemoehybrid",
        _MAMBA
        | {"num_local_experts": 0, "shared_intermediate_size": 100, "position_embedding_type": "rope"}
        | {"mamba_n_heads": 32, "mamba_conv_bias": False, "mamba_proj_bias": True, "tie_word_embeddings": True}
        | {"attention_multiplier": 0.1}
        | {"layer_types": ["linear_attention", "full_attention"], "time_step_limit": [0.3, 1.5]},
    ),
    "bamba": ("bamba", _MAMBA | {"num_attention_heads": 4, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", _MAMBA | _FALCON_H1 | {"mamba_rms_norm": True, "projectors_bias": True}),
    "falcon_h1_plain": ("falcon_h1", _MAMBA | {"mamba_d_ssm": None, "tie_word_embeddings": True}),
    "nemotron_h": (
        "nemotron_h",
        _NEMOTRON
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 52, "moe_shared_expert_intermediate_size": 60}
        | {"n_group": 2, "topk_group": 1, "moe_latent_size": 72, "routed_scaling_factor": 1.7},
    ),
}


_LATENT: dict[str, Any] = _MIXTURE | {
    "q_lora_rank": 56,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 12,
    "first_k_dense_replace": 1,
}
_SCALED = {**_YARN, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.3, "mscale_all_dim": 1.0}
_YARN_ALL = {**_YARN, "mscale": 0.8, "mscale_all_dim": 1.2}

FAMILIES |= {
    "deepseek_v3": (
        "deepseek_v3",
        _LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": _YARN_ALL, "attention_bias": True},
    ),
    "deepseek_v3_direct": (
        "deepseek_v3",
        _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "v_head_dim": 20},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.5},
    ),
    "deepseek_v2_lite": ("deepseek_v2", _LATENT | {"q_lora_rank": None, "rope_parameters": _YARN_ALL}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "mistral4": ("mistral4", _LATENT | {"n_group": 3, "topk_group": 2, "rope_parameters": _SCALED}),
    "minicpm3": ("minicpm3", {name: _LATENT[name] for name in _LATENT if not name.startswith(("n_", "num_"))}),
}

_FOUR_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05}
_COHERE = {"logit_scale": 0.3, "num_key_value_heads": 1}

_GEMMA: dict[str, Any] = {**_FOUR_HEADS, "num_key_value_heads": 2, "head_dim": 24, "num_hidden_layers": 4}
_GEMMA |= {"query_pre_attn_scalar": 17, "sliding_window": 33, "hidden_activation": "gelu_pytorch_tanh"}

_FALCON: dict[str, Any] = {"num_attention_heads": 4, "ffn_hidden_size": 200}

FAMILIES |= {
    "granite": ("granite", {**_GRANITE, "logits_scaling": 3.0, "num_key_value_heads": 1}),
    "granite_plain": ("granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "cohere": ("cohere", {**_COHERE, "attention_bias": True}),
    "cohere_qk_norm": ("cohere", {**_COHERE, "use_qk_norm": True}),
    "cohere_untied": ("cohere", {"tie_word_embeddings": False, "logit_scale": 1.0}),
    "cohere2": ("cohere2", {**_COHERE, "sliding_window": 33, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "cohere2_types": ("cohere2", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
    "gemma": ("gemma", {**_FOUR_HEADS, "head_dim": 24, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {**_GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "gemma2_uncapped": ("gemma2", {**_GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma3_text": ("gemma3_text", {**_GEMMA, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    "gemma3_text_scaled": (
        "gemma3_text",
        {
            **_GEMMA,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**_LINEAR, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "starcoder2_window": ("starcoder2", {"sliding_window": 33, "use_bias": False, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {**_FOUR_HEADS, "hidden_act": "gelu"}),
    "gpt_neox_serial": (
        "gpt_neox",
        {**_FOUR_HEADS, "hidden_act": "gelu", "use_parallel_residual": False, "attention_bias": False},
    ),
    "gpt2": ("gpt2", {"n_inner": 200}),
    "gpt2_scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "falcon": ("falcon", {}),
    "falcon_new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_new_one_norm": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_serial": (
        "falcon",
        {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "falcon_alibi": (
        "falcon",
        {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True, "alibi": True},
    ),
    "bloom": ("bloom", {}),
    "phi": ("phi", _FOUR_HEADS),
    "phi_qk_norm": ("phi", {**_FOUR_HEADS, "qk_layernorm": True, "partial_rotary_factor": 0.4}),
}

_SHARED_KV: dict[str, Any] = {**_FOUR_HEADS, "num_key_value_heads": 2, "num_hidden_layers": 6, "head_dim": 24}
_SHARED_KV |= {"sliding_window": 33, "hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 1003}
_SHARED_KV |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2}
_SHARED_KV |= {"num_kv_shared_layers": 3, "pad_token_id": 0}

FAMILIES |= {
    "gemma3n_text": (
        "gemma3n_text",
        {
            **_SHARED_KV,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.95, 0.0],
            "laurel_rank": 12,
            "altup_num_inputs": 3,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_text": ("gemma4_text", {**_SHARED_KV, "global_head_dim": 40, "use_double_wide_mlp": True}),
    "gemma4_text_experts": (
        "gemma4_text",
        {
            **_SHARED_KV,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 52,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 48,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}

_MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "tie_word_embeddings": True}

FAMILIES |= {  # the families of tests/support/own_references.py
    "minicpm": ("minicpm", {**_MINICPM, "num_key_value_heads": 1}),
    "internlm": ("internlm", {"bias": True}),
    "internlm2": ("internlm2", {**_FOUR_HEADS, "num_key_value_heads": 2, "bias": False, "rms_norm_eps": 1e-5}),
    "internlm3": (
        "internlm3",
        {"num_key_value_heads": 1, "head_dim": 24, "qkv_bias": False, "bias": True}
        | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
    ),
    "baichuan": ("baichuan", {"max_position_embeddings": None, "model_max_length": 256}),
    "baichuan_rope": ("baichuan", {}),
    "chatglm": (
        "chatglm",
        {**_FOUR_HEADS, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 24}
        | {"add_qkv_bias": True, "rope_ratio": 5.0, "layernorm_epsilon": 1e-5},
    ),
}

_GPT2_KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_OWN_KEYS: dict[str, dict[str, str]] = {
    "chatglm": {
        "vocab_size": "padded_vocab_size",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
    },
    "gpt2": {**_GPT2_KEYS, "max_position_embeddings": "n_positions"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length"},
}
"""By model_type the family's own names of keys of _SMALL."""

_QUICK_VARIANTS = ("llama_tied_one_kv_head", "llama_head_dim", "qwen3_tied_head_dim", "mistral_window")
_FIRST_ROWS = {row[0]: name for name, row in reversed(FAMILIES.items())}

FAMILY_PARAMS = mostly_long(FAMILIES, *_FIRST_ROWS.values(), *_QUICK_VARIANTS)
"""The rows as parameters of a test: the first of each model_type runs each time, its variants with the long tests."""

_QUICK_ON_GRAPHS = ("llama_tied_one_kv_head", "qwen2_windows", "qwen3_moe")
_LONG_ON_GRAPHS = (
    *("llama_biases", "gpt2", "bloom", "cohere", "gemma2", "gpt_oss", "mixtral"),
    *("qwen3_5_text", "granitemoehybrid", "lfm2", "deepseek_v2", "gemma3n_text"),
)
GRAPH_PARAMS = mostly_exhaustive(FAMILIES, _QUICK_ON_GRAPHS, _LONG_ON_GRAPHS)
"""The rows for tests of a part of the way from network to bundle: one of each kind of layer.  All of FAMILY_PARAMS go
the whole way, in tests/models/test_families.py."""

_QUICK_ON_RANKS = (
    "llama_tied_one_kv_head",
    "qwen2_windows",
    "gpt2",
    "gemma2",
    "falcon_new",
    "bloom",
    "olmo2",
    "mixtral",
    "granitemoehybrid",
    "deepseek_v2",
)
LONG_ON_RANKS = [name for name in _LONG_ON_GRAPHS if name not in _QUICK_ON_RANKS]
RANK_FAMILIES = mostly_exhaustive(FAMILIES, _QUICK_ON_RANKS, LONG_ON_RANKS)
"""The rows as parameters of a test of ranks: those whose graphs are cut in ways of their own run each time, one of each
other kind of layer with the long tests."""


_OWN_CLASSES = {"mistral4": "Mistral4ForCausalLM"}
"""The class of a model_type that the automatic class does not know; its import takes long."""


def sizes_of(name: str) -> dict[str, Any]:
    """The values of a row's config, under the family's own keys."""
    model_type, changes = FAMILIES[name]
    sizes = {_OWN_KEYS.get(model_type, {}).get(key, key): value for key, value in _SMALL.items()} | changes
    return copy.deepcopy(sizes)  # configs of transformers change nested values, which several rows share


def config_of(name: str) -> dict[str, Any]:
    """The row's config.json, without its network."""
    model_type = FAMILIES[name][0]
    if model_type in OWN_REFERENCES:
        values = {"model_type": model_type} | sizes_of(name)
        return {key: value for key, value in values.items() if value is not None}
    return {"model_type": model_type} | transformers.AutoConfig.for_model(model_type, **sizes_of(name)).to_dict()


@cache
def build(name: str) -> transformers.PreTrainedModel | OwnReference:
    """The reference network, its weights random: biases and norms too, so that a forgotten one shows."""
    torch.manual_seed(0)
    model_type = FAMILIES[name][0]
    if model_type in OWN_REFERENCES:
        values = {"model_type": model_type} | sizes_of(name)
        return OWN_REFERENCES[model_type]({k: v for k, v in values.items() if v is not None}).fill()
    config = transformers.AutoConfig.for_model(model_type, **sizes_of(name))
    own = _OWN_CLASSES.get(model_type)
    auto = getattr(transformers, own)._from_config if own else transformers.AutoModelForCausalLM.from_config
    # The eager attention of falcon in transformers 5.24 adds the bias of ALiBi twice, the other one adds it once.
    kind = "sdpa" if name == "falcon_alibi" else "eager"
    model = auto(config, attn_implementation=kind).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith(("_bias", "q_norm.weight", "k_norm.weight")):
                shift = 0.0 if parameter_name.endswith("bias") else 1.0
                parameter.copy_(shift + 0.2 * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif buffer_name.endswith("act_fn.beta"):
                buffer.fill_(0.3)
            elif buffer_name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.2 * torch.rand_like(buffer))
    return model


def save(name: str, folder: Path) -> Path:
    """The network as a Hugging Face folder."""
    build(name).save_pretrained(folder)
    return folder


def expected_logits(name: str, token_ids: list[int]) -> np.ndarray:
    """Logits [len, vocab] of the reference in float32."""
    with torch.no_grad():
        return build(name)(torch.tensor([token_ids])).logits[0].numpy()


def prompt(num_tokens: int) -> list[int]:
    return np.random.default_rng(num_tokens).integers(0, 1003, num_tokens).tolist()
