"""Decoders of which some layers have a state instead of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.checkpoint.gguf.architectures.architecture import (
    GRANITE_FACTORS,
    LAYER_NAMES,
    LAYER_NORM,
    SHARED,
    SIZES,
    Architecture,
    expert_names,
)
from penstock.checkpoint.gguf.architectures.delta import DELTA_KEYS, DELTA_NAMES, delta_parts, delta_values
from penstock.checkpoint.gguf.architectures.mamba import (
    MAMBA_KEYS,
    bamba_values,
    falcon_parts,
    falcon_values,
    mamba_parts,
    mamba_values,
    nemotron_moe_values,
    nemotron_parts,
    nemotron_values,
)
from penstock.checkpoint.gguf.architectures.routing import ROUTING_KEYS
from penstock.checkpoint.gguf.architectures.values import lfm_2

__all__ = ["BAMBA", "GRANITE_HYBRID", "HYBRIDS"]

_DELTA_EXPERTS: Final = {
    part: name for part, name in {**expert_names("mlp"), **SHARED, **DELTA_NAMES}.items() if part != "ffn_norm"
}
_MIXER: Final = {
    "attn_norm": "norm",
    **{part: f"mixer.{LAYER_NAMES[part].split('.')[1]}" for part in ("attn_q", "attn_k", "attn_v", "attn_output")},
    "ssm_conv1d": "mixer.conv1d",
    "ssm_out": "mixer.out_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
HYBRIDS: Final[dict[str, Architecture]] = {
    "lfm2": Architecture(
        "lfm2",
        read=lfm_2,
        has_attention_in_some=True,
        layer_names={
            **LAYER_NAMES,
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        keys=("shortconv.l_cache",),
        constants={"block_auto_adjust_ff_dim": False},
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        read=mamba_values,
        read_parts=mamba_parts,
        has_attention_in_some=True,
        has_pairs=True,
        layer_names={
            **{part: name for part, name in LAYER_NAMES.items() if not part.startswith("ffn_") or part == "ffn_norm"},
            **{f"ffn_{own}{end}": f"shared_mlp.{own}_proj" for own in ("gate", "up", "down") for end in ("", "_shexp")},
            "ssm_conv1d": "mamba.conv1d",
            "ssm_out": "mamba.out_proj",
        },
        factors=GRANITE_FACTORS,
        keys=("expert_shared_feed_forward_length", *MAMBA_KEYS),
        constants={"num_local_experts": 0},
        is_own_form=True,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        read=delta_values,
        read_parts=delta_parts,
        has_extra_layers=True,
        layer_names=_DELTA_EXPERTS,
        keys=(*SIZES, "expert_shared_feed_forward_length", *DELTA_KEYS),
        constants={"norm_topk_prob": True},
        num_experts="num_experts",
        is_own_form=True,
        rotates_in_part=True,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        read=delta_values,
        read_parts=delta_parts,
        has_extra_layers=True,
        layer_names={**{part: name for part, name in LAYER_NAMES.items() if part != "ffn_norm"}, **DELTA_NAMES},
        keys=DELTA_KEYS,
        is_own_form=True,
        rotates_in_part=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        read=delta_values,
        read_parts=delta_parts,
        has_extra_layers=True,
        layer_names=_DELTA_EXPERTS,
        keys=(*SIZES, "expert_shared_feed_forward_length", *DELTA_KEYS),
        num_experts="num_experts",
        is_own_form=True,
        rotates_in_part=True,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        read=falcon_values,
        read_parts=falcon_parts,
        layer_names={
            **{part: name.replace("mlp.", "feed_forward.") for part, name in LAYER_NAMES.items()},
            "ssm_conv1d": "mamba.conv1d",
            "ssm_out": "mamba.out_proj",
        },
        keys=MAMBA_KEYS,
        is_own_form=True,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        read=nemotron_values,
        read_parts=nemotron_parts,
        layer_names=_MIXER,
        keys=(*MAMBA_KEYS, "attention.layer_norm_rms_epsilon"),
        is_own_form=True,
        norm_key=LAYER_NORM,
        has_no_rope=True,
        biases={},
        own_keys={"rms_norm_eps": "layer_norm_epsilon"},
        top_names={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        layers="backbone.layers",
        has_attention_in_some=True,
        has_extra_layers=True,
    ),
}

HYBRIDS["nemotron_h_moe"] = replace(
    HYBRIDS["nemotron_h"],
    read=nemotron_moe_values,
    keys=(
        *HYBRIDS["nemotron_h"].keys,
        *ROUTING_KEYS,
        *SIZES,
        "expert_shared_feed_forward_length",
        "moe_latent_size",
    ),
    num_experts="n_routed_experts",
    own_keys={
        **HYBRIDS["nemotron_h"].own_keys,
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    },
)
GRANITE_HYBRID: Final = replace(
    HYBRIDS["granitehybrid"],
    layer_names={**expert_names("block_sparse_moe"), **HYBRIDS["granitehybrid"].layer_names},
    keys=(*HYBRIDS["granitehybrid"].keys, *SIZES),
    constants={},
    num_experts="num_local_experts",
    expert_size="intermediate_size",
)
"""Architecture granitehybrid, if the number of experts is not 0."""
BAMBA: Final = replace(
    HYBRIDS["granitehybrid"],
    model_type="bamba",
    read=bamba_values,
    layer_names={
        **{part: name.replace("mlp.", "feed_forward.") for part, name in LAYER_NAMES.items()},
        "ffn_norm": "pre_ff_layernorm",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_out": "mamba.out_proj",
    },
    factors={},
    keys=MAMBA_KEYS,
    constants={},
    rotates_in_part=True,
)
"""Architecture granitehybrid, without Granite's factors."""
