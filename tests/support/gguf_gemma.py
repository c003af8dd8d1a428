"""Small random models of Gemma 3n and 4 as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from tests.support.gguf_models import Family

__all__ = ["GEMMA_FAMILIES"]

KINDS = ["sliding_attention", "full_attention"] * 2
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 4, "hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 300,
    "layer_types": KINDS, "num_kv_shared_layers": 2, "pad_token_id": 0,
}  # fmt: skip
KEYS: dict[str, Any] = {
    "block_count": 4, "attention.sliding_window": 4, "embedding_length_per_layer_input": 20,
    "attention.sliding_window_pattern": [True, False, True, False], "attention.shared_kv_layers": 2,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
}  # fmt: skip
HEADS: dict[str, Any] = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
}  # fmt: skip
DIVISORS = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40,
           "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
           "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0}  # fmt: skip
EXPERT_KEYS: dict[str, Any] = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 40, "final_logit_softcapping": 5.0,
    "attention.head_count_kv": [2, 1, 2, 1], "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
}  # fmt: skip


def _gemma(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors whose names or forms are not those of others.  "#" and a number: a matrix of a tensor."""
    parts = name.split(".")
    if parts[1] in ("altup_projections", "altup_unembed_projections"):
        own = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}[parts[1]]
        return {f"{own}.weight#{parts[2]}": array}
    ends = {"layer_scalar": "layer_output_scale.weight", "altup.correct_output_scale": "altup_correct_scale.weight",
            "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
            "router.proj.weight": "ffn_gate_inp.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
            "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
            "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight"}  # fmt: skip
    found = next((own for end, own in ends.items() if name.endswith(f".{end}")), None)
    return {} if found is None else {f"blk.{parts[2]}.{found}": array}


GEMMA_FAMILIES = {
    "gemma3n": Family(
        "Gemma3n",
        gguf.MODEL_ARCH.GEMMA3N,
        {
            **SHARED,
            "activation_sparsity_pattern": [0.9, 0.0, 0.95, 0.0],
            "laurel_rank": 12,
            "altup_num_inputs": 4,
            "intermediate_size": [96] * 4,
        },
        {
            **KEYS,
            "feed_forward_length": [96] * 4,
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "activation_sparsity_scale": [1.2815516, -np.inf, 1.6448536, -np.inf],
            "final_logit_softcapping": 30.0,
        },
        forms=_gemma,
    ),
    "gemma4": Family(
        "Gemma4",
        gguf.MODEL_ARCH.GEMMA4,
        {**SHARED, "global_head_dim": 32, "use_double_wide_mlp": True},
        {**KEYS, **HEADS, "feed_forward_length": [96, 96, 192, 192]},
        tables=DIVISORS,
        forms=_gemma,
    ),
    "gemma4 with experts": Family(
        "Gemma4",
        gguf.MODEL_ARCH.GEMMA4,
        {**SHARED, "global_head_dim": 32, **EXPERTS},
        {**KEYS, **HEADS, **EXPERT_KEYS},
        tables=DIVISORS,
        forms=_gemma,
    ),
}
