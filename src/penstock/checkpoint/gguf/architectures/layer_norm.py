"""Decoders with layer norms."""

from __future__ import annotations

from typing import Any, Final

from penstock.checkpoint.gguf.architectures.architecture import (
    LAYER_NAMES,
    LAYER_NORM,
    WINDOW,
    WINDOW_PATTERN,
    Architecture,
)
from penstock.checkpoint.gguf.architectures.values import command_r, falcon, gpt_neox, olmo, window_or_none

__all__ = ["LAYER_NORMS"]

_KEYS: Final = {"rms_norm_eps": "layer_norm_eps"}
_STACKED: Final[dict[str, Any]] = {
    "layer_names": {
        **LAYER_NAMES,
        "ffn_norm": "mlp_layernorm",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "is_own_form": True,
    "norm_key": LAYER_NORM,
    "top_names": {
        "token_embd": "embed_tokens",
        "position_embd": "embed_positions",
        "token_embd_norm": "embed_norm",
        "output_norm": "final_norm",
    },
    "layers": "layers",
}
"""The network that GPT-2, GPT-NeoX, Falcon and BLOOM have, by its own names."""
LAYER_NORMS: Final[dict[str, Architecture]] = {
    "starcoder2": Architecture(
        "starcoder2",
        layer_names={**LAYER_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_key=LAYER_NORM,
        biases={"use_bias": "attn_q"},
        own_keys={"rms_norm_eps": "norm_epsilon"},
    ),
    "phi2": Architecture(
        "phi",
        layer_names={**LAYER_NAMES, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        norm_key=LAYER_NORM,
        rotates_in_part=True,
        own_keys=_KEYS,
        top_names={"output_norm": "model.final_layernorm"},
    ),
    "gptneox": Architecture(
        "gpt_neox",
        read=gpt_neox,
        **_STACKED,
        keys=("use_parallel_residual",),
        rotates_in_part=True,
        biases={"attention_bias": "attn_qkv"},
        own_keys={**_KEYS, "partial_rotary_factor": "rotary_pct"},
    ),
    "falcon": Architecture(
        "falcon",
        read=falcon,
        **_STACKED,
        biases={"bias": "attn_qkv"},
        own_keys={"intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layer_norm_epsilon"},
        names_beside={"attn_norm_2": {"attn_norm": "mlp_layernorm", "attn_norm_2": "input_layernorm"}},
    ),
    "gpt2": Architecture(
        "gpt2",
        **_STACKED,
        biases={},
        own_keys={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "bloom": Architecture(
        "bloom",
        **_STACKED,
        biases={},
        own_keys={
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "seq_length",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "command-r": Architecture(
        "cohere", read=command_r, factors={"logit_scale": "logit_scale"}, norm_key=LAYER_NORM, own_keys=_KEYS
    ),
    "cohere2": Architecture(
        "cohere2",
        read=window_or_none,
        factors={"logit_scale": "logit_scale"},
        keys=(WINDOW, WINDOW_PATTERN),
        norm_key=LAYER_NORM,
        own_keys=_KEYS,
    ),
    "olmo": Architecture("olmo", read=olmo, has_pairs=True, keys=("attention.clamp_kqv",), norm_key=LAYER_NORM),
}
