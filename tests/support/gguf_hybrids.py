"""Small random models with Mamba-2 beside attention as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from tests.support.gguf_models import HALF, THETA, Family

__all__ = ["HYBRID_FAMILIES"]

FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.2, "key_multiplier": 0.7, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [1.1, 0.6], "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
}  # fmt: skip
FALCON = {"mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 12,
          "mamba_d_conv": 4, "mamba_rms_norm": True, "mamba_norm_before_gate": False}  # fmt: skip
FALCON_KEYS = {"ssm.conv_kernel": 4, "ssm.state_size": 12, "ssm.group_count": 2, "ssm.time_step_rank": 8,
               "ssm.inner_size": 96}  # fmt: skip
KINDS = ["linear_attention", "moe", "full_attention", "linear_attention"]
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 12, "conv_kernel": 4, "chunk_size": 4,
    "num_hidden_layers": 4, "layers_block_type": KINDS, "time_step_min": 1e-9, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
NEMOTRON_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 56, "moe_latent_size": 48, "routed_scaling_factor": 1.7,
}  # fmt: skip
NEMOTRON_KEYS: dict[str, Any] = {
    "rope.dimension_count": 10,  # no key's length: converters write the hidden size divided by the heads
    **FALCON_KEYS, "block_count": 4, "attention.head_count_kv": [0, 0, 2, 0], "rope.scaling.finetuned": False,
    "attention.layer_norm_epsilon": 1e-5, "feed_forward_length": [0, 96, 0, 0],
}  # fmt: skip
NEMOTRON_MOE_KEYS: dict[str, Any] = {
    **NEMOTRON_KEYS, "feed_forward_length": [0, 40, 0, 0], "expert_count": 4, "expert_used_count": 2,
    "expert_feed_forward_length": 40, "expert_shared_feed_forward_length": 56, "expert_shared_count": 1,
    "expert_weights_norm": True, "expert_weights_scale": 1.7, "expert_group_count": 2, "expert_group_used_count": 1,
    "moe_latent_size": 48,
}  # fmt: skip


def _mamba(block: str, part: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return a tensor of Mamba-2 in the form of the file; {} for another one."""
    plain = {"dt_bias": ("ssm_dt.bias", array), "conv1d.bias": ("ssm_conv1d.bias", array),
             "conv1d.weight": ("ssm_conv1d.weight", array.squeeze()), "in_proj.weight": ("ssm_in.weight", array),
             "out_proj.weight": ("ssm_out.weight", array)}  # fmt: skip
    if part in plain:
        return {f"{block}.{plain[part][0]}": plain[part][1]}
    if part in ("A_log", "D"):
        values = -np.exp(array[:, None]) if part == "A_log" else array[:, None]
        return {f"{block}.{'ssm_a' if part == 'A_log' else 'ssm_d'}": values}
    return {f"{block}.ssm_norm.weight": array.reshape(2, -1)} if part == "norm.weight" else {}


def _falcon_h1(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return a tensor times the factors that the network has for it, under its name in the file."""
    f = FACTORS
    inside = f["attention_in_multiplier"]
    ssm = np.repeat(f["ssm_multipliers"], [96, 96, 24, 24, 8]).astype(np.float32)[:, None]
    factors = {"embed_tokens": f["embedding_multiplier"], "lm_head": f["lm_head_multiplier"], "q_proj": inside,
               "k_proj": inside * f["key_multiplier"], "v_proj": inside, "o_proj": f["attention_out_multiplier"],
               "gate_proj": f["mlp_multipliers"][0], "down_proj": f["mlp_multipliers"][1],
               "in_proj": f["ssm_in_multiplier"] * ssm, "out_proj": f["ssm_out_multiplier"]}  # fmt: skip
    module = name.split(".")[-2]
    array = (array * np.float32(factors.get(module, 1.0))).astype(np.float32)
    top = {"embed_tokens": "token_embd", "final_layernorm": "output_norm", "lm_head": "output"}
    if module in top:
        return {f"{top[module]}.weight": array}
    block, part = f"blk.{name.split('.')[2]}", name.split(".", 4)[-1]
    if ".mamba." in name:
        return _mamba(block, part, array)
    if module == "pre_ff_layernorm":
        return {f"{block}.ffn_norm": array}
    own = {"input_layernorm": "attn_norm", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
           "down_proj": "ffn_down"}.get(module, f"attn_{module[0]}")  # fmt: skip
    return {f"{block}.{own}.weight": array}


def _nemotron_h(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return a tensor under its name in the file."""
    parts = name.split(".")
    top = {"embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output"}
    if parts[-2] in top:
        return {f"{top[parts[-2]]}.weight": array}
    block, part = f"blk.{parts[2]}", name.split(".", 4)[-1]
    if parts[3] == "norm":
        return {f"{block}.attn_norm.weight": array}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up",
             "down_proj": "ffn_down", "gate": "ffn_gate_inp", "fc1_latent_proj": "ffn_latent_down",
             "fc2_latent_proj": "ffn_latent_up", "experts.up_proj": "ffn_up_exps",
             "experts.down_proj": "ffn_down_exps", "shared_experts.up_proj": "ffn_up_shexp",
             "shared_experts.down_proj": "ffn_down_shexp"}  # fmt: skip
    own = names.get(part.removesuffix(".weight"))
    return _mamba(block, part, array) if own is None else {f"{block}.{own}.weight": array}


def _bamba(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return a tensor of Mamba-2 in the form of the file; {} for another one."""
    if ".mamba." not in name:
        return {}
    return _mamba(f"blk.{name.split('.')[2]}", name.split(".", 4)[-1], array)


BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
         "mamba_expand": 2, "attn_layer_indices": [1], "attn_rotary_emb": 8, **HALF}  # fmt: skip

HYBRID_FAMILIES = {
    "bamba": Family(
        "Bamba",
        gguf.MODEL_ARCH.GRANITE_HYBRID,
        {**BAMBA, "tie_word_embeddings": False},
        {
            **FALCON_KEYS,
            "ssm.inner_size": 128,
            "attention.head_count_kv": [0, 2],
            "rope.dimension_count": 8,
            "rope.scaling.finetuned": True,
        },
        has_pairs=True,
        forms=_bamba,
    ),
    "falcon-h1": Family(
        "FalconH1",
        gguf.MODEL_ARCH.FALCON_H1,
        {**FALCON, **FACTORS, **THETA, "tie_word_embeddings": False},
        FALCON_KEYS,
        forms=_falcon_h1,
    ),
    "nemotron_h": Family(
        "NemotronH",
        gguf.MODEL_ARCH.NEMOTRON_H,
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
        NEMOTRON_KEYS,
        forms=_nemotron_h,
    ),
    "nemotron_h_moe": Family(
        "NemotronH",
        gguf.MODEL_ARCH.NEMOTRON_H_MOE,
        {**NEMOTRON, **NEMOTRON_EXPERTS},
        NEMOTRON_MOE_KEYS,
        forms=_nemotron_h,
    ),
}
