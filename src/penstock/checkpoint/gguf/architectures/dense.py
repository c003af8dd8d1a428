"""Decoders with RMS norms and one feed-forward layer each."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.checkpoint.gguf.architectures.architecture import (
    BOTH_NORMS,
    CAPS,
    GRANITE_FACTORS,
    LAYER_NAMES,
    WINDOW,
    WINDOW_PATTERN,
    Architecture,
)
from penstock.checkpoint.gguf.architectures.values import (
    apertus,
    baichuan,
    eurobert,
    gemma_2,
    gemma_3,
    minicpm,
    olmo_3,
    window_or_none,
    xielu,
)
from penstock.checkpoint.gguf.pooling import POOLING_KEYS, RERANK_KEYS

__all__ = ["DENSE", "OLMO_3"]

_DENSE_KEYS: Final = tuple(f"dense_{index}_feat_{end}" for index in (2, 3) for end in ("in", "out"))
DENSE: Final[dict[str, Architecture]] = {
    "llama": Architecture("llama", has_pairs=True, keys=POOLING_KEYS),
    "qwen2": Architecture("qwen2", keys=POOLING_KEYS, biases={}),
    "qwen3": Architecture("qwen3", keys=RERANK_KEYS),
    "phi3": Architecture(
        "phi3",
        layer_names={**LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=(WINDOW,),
        rotates_in_part=True,
    ),
    "granite": Architecture("granite", has_pairs=True, factors=GRANITE_FACTORS),
    "gemma": Architecture("gemma", is_own_form=True),
    "gemma2": Architecture(
        "gemma2", read=gemma_2, layer_names={**LAYER_NAMES, **BOTH_NORMS}, keys=(WINDOW, *CAPS), is_own_form=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        read=gemma_3,
        layer_names={**LAYER_NAMES, **BOTH_NORMS},
        keys=(WINDOW, *CAPS, WINDOW_PATTERN, "mm.tokens_per_image", "rope.freq_base_swa"),
        is_own_form=True,
    ),
    "gemma-embedding": Architecture(
        "gemma3_text",
        read=gemma_3,
        layer_names={**LAYER_NAMES, **BOTH_NORMS},
        keys=(WINDOW, WINDOW_PATTERN, "rope.freq_base_swa", *POOLING_KEYS, *_DENSE_KEYS),
        constants={"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]},
        is_own_form=True,
        head_parts=("dense_2", "dense_3"),
    ),
    "olmo2": Architecture(
        "olmo2",
        layer_names={**LAYER_NAMES, **{part: BOTH_NORMS[part] for part in ("post_attention_norm", "post_ffw_norm")}},
    ),
    "smollm3": Architecture("smollm3", has_pairs=True),
    "exaone4": Architecture(
        "exaone4",
        read=window_or_none,
        layer_names={**LAYER_NAMES, **{part: BOTH_NORMS[part] for part in ("post_attention_norm", "post_ffw_norm")}},
        keys=(WINDOW, WINDOW_PATTERN),
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "seed_oss": Architecture(
        "seed_oss",
        layer_names={**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output"},
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        layer_names={
            **LAYER_NAMES,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "glm4": Architecture(
        "glm4",
        layer_names={
            **LAYER_NAMES,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        rotates_in_part=True,
    ),
    "chatglm": Architecture(
        "glm",
        layer_names={**LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"},
        rotates_in_part=True,
        biases={"attention_bias": "attn_qkv"},
    ),
    "internlm2": Architecture("internlm2", has_pairs=True, biases={"bias": "attn_q"}, is_own_form=True),
    "minicpm": Architecture(
        "minicpm",
        read=minicpm,
        has_pairs=True,
        factors={"embedding_scale": "scale_emb"},
        keys=("residual_scale", "logit_scale"),
        is_own_form=True,
    ),
    "baichuan": Architecture(
        "baichuan",
        read=baichuan,
        has_pairs=True,
        biases={},
        is_own_form=True,
        unit_head_rows=125696,
    ),
    "eurobert": Architecture(
        "eurobert",
        read=eurobert,
        keys=("attention.causal", *POOLING_KEYS),
        constants={"architectures": ["EuroBertModel"]},
    ),
    "apertus": Architecture(
        "apertus",
        read=apertus,
        layer_names={**LAYER_NAMES, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        layer_constants=xielu,
    ),
}
OLMO_3: Final = replace(
    DENSE["olmo2"], model_type="olmo3", read=olmo_3, keys=(WINDOW, WINDOW_PATTERN, "rope.freq_base_swa")
)
"""Architecture olmo2, if layers have windows."""
