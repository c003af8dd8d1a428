"""The architectures of GGUF files (``general.architecture``) that Penstock has a network for, and their tensor names.

The names of tensors are those of llama.cpp's ``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.checkpoint.gguf.delta import DELTA_KEYS, DELTA_NAMES
from penstock.checkpoint.gguf.encoder import ENCODERS
from penstock.checkpoint.gguf.mamba import MAMBA_KEYS
from penstock.checkpoint.gguf.metadata import Metadata
from penstock.checkpoint.gguf.pooling import POOLING_KEYS, RERANK_KEYS
from penstock.config import show
from penstock.errors import UnsupportedError

__all__ = ["TOP_NAMES", "Architecture", "architecture_of", "find_architecture"]

TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "cls.output": "score",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BOTH_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GRANITE_FACTORS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_SIZES: Final = ("expert_feed_forward_length",)


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture.

    ``has_pairs``: the file has the rows of q and k in adjacent pairs.  ``layer_names``: the module of a layer that each
    tensor of a layer is the weight of; "{}" stands for the number of an expert, of which the tensor has all.
    ``factors``: keys of numbers that the architecture must have, with their names in config.json.  ``keys``: further
    keys that it may have.  ``constants``: values of config.json that no key has.  ``num_experts``: the name of the
    number of experts in config.json, "" for none.  ``expert_size``: that of the width of an expert.  ``alternates``: a
    tensor of experts whose rows alternate with those of another.  ``is_own_form``: the file has the values of the
    network's parameters, where a checkpoint folder has another form.  ``norm_key``: that of the epsilon of norms.
    ``rotates_in_part``: rope.dimension_count may be less than a head.  ``biases``: keys of config.json that say whether
    there are biases, with the linear that has one.  ``own_keys``: the family's names of the keys of config.json.
    ``scaling_constants``: values of rope_scaling that no key has.  ``top_names``: modules outside layers with names of
    their own.  ``layers``: the path of the layers.  ``names_beside``: names in layers beside a tensor that layer 0 has.
    ``head_parts``: linears of the pooling head, in their order.
    """

    model_type: str
    has_pairs: bool = False
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    factors: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    num_experts: str = ""
    expert_size: str = "moe_intermediate_size"
    alternates: Mapping[str, str] = field(default_factory=dict)
    is_own_form: bool = False
    norm_key: str = "attention.layer_norm_rms_epsilon"
    rotates_in_part: bool = False
    biases: Mapping[str, str] = field(default_factory=lambda: {"attention_bias": "attn_q"})
    own_keys: Mapping[str, str] = field(default_factory=dict)
    scaling_constants: Mapping[str, object] = field(default_factory=dict)
    top_names: dict[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    names_beside: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    head_parts: tuple[str, ...] = ()


def _experts(path: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    """Return the names of a layer whose mixture is the module ``path``; ``names`` are those of gate, up and down."""
    dense = {part: name for part, name in _LAYER_NAMES.items() if not part.startswith("ffn_") or part == "ffn_norm"}
    parts = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    own = {part: f"{path}.experts.{{}}.{name}" for part, name in zip(parts, names, strict=True)}
    return {**dense, "ffn_gate_inp": f"{path}.gate", **own}


_SHARED: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_WINDOW: Final = "attention.sliding_window"
_WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
_DENSE_KEYS: Final = tuple(f"dense_{index}_feat_{end}" for index in (2, 3) for end in ("in", "out"))
_LAYER_NORM: Final = "attention.layer_norm_epsilon"
_LAYER_NORM_KEYS: Final = {"rms_norm_eps": "layer_norm_eps"}
_STACKED: Final[dict[str, Any]] = {
    "layer_names": {
        **_LAYER_NAMES,
        "ffn_norm": "mlp_layernorm",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "is_own_form": True,
    "norm_key": _LAYER_NORM,
    "top_names": {
        "token_embd": "embed_tokens",
        "position_embd": "embed_positions",
        "token_embd_norm": "embed_norm",
        "output_norm": "final_norm",
    },
    "layers": "layers",
}
"""The network that GPT-2, GPT-NeoX, Falcon and BLOOM have, by its own names."""
_CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")

_DELTA_EXPERTS: Final = {
    part: name for part, name in {**_experts("mlp"), **_SHARED, **DELTA_NAMES}.items() if part != "ffn_norm"
}

_ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("llama", has_pairs=True, keys=POOLING_KEYS),
    "qwen2": Architecture("qwen2", keys=POOLING_KEYS, biases={}),
    "qwen3": Architecture("qwen3", keys=RERANK_KEYS),
    "phi3": Architecture(
        "phi3",
        layer_names={**_LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys=(_WINDOW,),
        rotates_in_part=True,
    ),
    "granite": Architecture("granite", has_pairs=True, factors=_GRANITE_FACTORS),
    "gemma": Architecture("gemma", is_own_form=True),
    "gemma2": Architecture(
        "gemma2", layer_names={**_LAYER_NAMES, **_BOTH_NORMS}, keys=(_WINDOW, *_CAPS), is_own_form=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        layer_names={**_LAYER_NAMES, **_BOTH_NORMS},
        keys=(_WINDOW, *_CAPS, _WINDOW_PATTERN, "mm.tokens_per_image", "rope.freq_base_swa"),
        is_own_form=True,
    ),
    "gemma-embedding": Architecture(
        "gemma3_text",
        layer_names={**_LAYER_NAMES, **_BOTH_NORMS},
        keys=(_WINDOW, _WINDOW_PATTERN, "rope.freq_base_swa", *POOLING_KEYS, *_DENSE_KEYS),
        constants={"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]},
        is_own_form=True,
        head_parts=("dense_2", "dense_3"),
    ),
    "olmo2": Architecture(
        "olmo2",
        layer_names={**_LAYER_NAMES, **{part: _BOTH_NORMS[part] for part in ("post_attention_norm", "post_ffw_norm")}},
    ),
    "smollm3": Architecture("smollm3", has_pairs=True),
    "qwen2moe": Architecture(
        "qwen2_moe",
        layer_names={**_experts("mlp"), **_SHARED},
        keys=(*_SIZES, "expert_shared_feed_forward_length"),
        constants={"norm_topk_prob": False},
        num_experts="num_experts",
        biases={},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        layer_names=_experts("mlp"),
        keys=_SIZES,
        constants={"norm_topk_prob": True},
        num_experts="num_experts",
    ),
    "olmoe": Architecture(
        "olmoe",
        layer_names=_experts("mlp"),
        keys=_SIZES,
        constants={"norm_topk_prob": False},
        num_experts="num_experts",
        expert_size="intermediate_size",
    ),
    "granitemoe": Architecture(
        "granitemoe",
        has_pairs=True,
        layer_names=_experts("block_sparse_moe"),
        factors=_GRANITE_FACTORS,
        keys=_SIZES,
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        is_own_form=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        layer_names={
            **_experts("mlp", ("gate_up_proj", "gate_up_proj", "down_proj")),
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys=(*_SIZES, _WINDOW),
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        alternates={"ffn_gate_exps": "ffn_up_exps"},
        is_own_form=True,
        scaling_constants={"truncate": False},
    ),
    "lfm2": Architecture(
        "lfm2",
        layer_names={
            **_LAYER_NAMES,
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
        has_pairs=True,
        layer_names={
            **{part: name for part, name in _LAYER_NAMES.items() if not part.startswith("ffn_") or part == "ffn_norm"},
            **{f"ffn_{own}{end}": f"shared_mlp.{own}_proj" for own in ("gate", "up", "down") for end in ("", "_shexp")},
            "ssm_conv1d": "mamba.conv1d",
            "ssm_out": "mamba.out_proj",
        },
        factors=_GRANITE_FACTORS,
        keys=("expert_shared_feed_forward_length", *MAMBA_KEYS),
        constants={"num_local_experts": 0},
        is_own_form=True,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        layer_names=_DELTA_EXPERTS,
        keys=(*_SIZES, "expert_shared_feed_forward_length", *DELTA_KEYS),
        constants={"norm_topk_prob": True},
        num_experts="num_experts",
        is_own_form=True,
        rotates_in_part=True,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        layer_names={**{part: name for part, name in _LAYER_NAMES.items() if part != "ffn_norm"}, **DELTA_NAMES},
        keys=DELTA_KEYS,
        is_own_form=True,
        rotates_in_part=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        layer_names=_DELTA_EXPERTS,
        keys=(*_SIZES, "expert_shared_feed_forward_length", *DELTA_KEYS),
        num_experts="num_experts",
        is_own_form=True,
        rotates_in_part=True,
    ),
    "exaone4": Architecture(
        "exaone4",
        layer_names={**_LAYER_NAMES, **{part: _BOTH_NORMS[part] for part in ("post_attention_norm", "post_ffw_norm")}},
        keys=(_WINDOW, _WINDOW_PATTERN),
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "seed_oss": Architecture(
        "seed_oss",
        layer_names={**_LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output"},
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        layer_names={
            **_LAYER_NAMES,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "glm4": Architecture(
        "glm4",
        layer_names={
            **_LAYER_NAMES,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        rotates_in_part=True,
    ),
    "chatglm": Architecture(
        "glm",
        layer_names={**_LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"},
        rotates_in_part=True,
        biases={"attention_bias": "attn_qkv"},
    ),
    "internlm2": Architecture("internlm2", has_pairs=True, biases={"bias": "attn_q"}, is_own_form=True),
    "minicpm": Architecture(
        "minicpm",
        has_pairs=True,
        factors={"embedding_scale": "scale_emb"},
        keys=("residual_scale", "logit_scale"),
        is_own_form=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        layer_names={**_LAYER_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_key=_LAYER_NORM,
        biases={"use_bias": "attn_q"},
        own_keys={"rms_norm_eps": "norm_epsilon"},
    ),
    "phi2": Architecture(
        "phi",
        layer_names={**_LAYER_NAMES, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        norm_key=_LAYER_NORM,
        rotates_in_part=True,
        own_keys=_LAYER_NORM_KEYS,
        top_names={"output_norm": "model.final_layernorm"},
    ),
    "gptneox": Architecture(
        "gpt_neox",
        **_STACKED,
        keys=("use_parallel_residual",),
        rotates_in_part=True,
        biases={"attention_bias": "attn_qkv"},
        own_keys={**_LAYER_NORM_KEYS, "partial_rotary_factor": "rotary_pct"},
    ),
    "falcon": Architecture(
        "falcon",
        **_STACKED,
        keys=("tensor_data_layout",),
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
        "cohere", factors={"logit_scale": "logit_scale"}, norm_key=_LAYER_NORM, own_keys=_LAYER_NORM_KEYS
    ),
    "cohere2": Architecture(
        "cohere2",
        factors={"logit_scale": "logit_scale"},
        keys=(_WINDOW, _WINDOW_PATTERN),
        norm_key=_LAYER_NORM,
        own_keys=_LAYER_NORM_KEYS,
    ),
    "olmo": Architecture("olmo", has_pairs=True, keys=("attention.clamp_kqv",), norm_key=_LAYER_NORM),
    **{name: Architecture(model_type) for name, model_type in ENCODERS.items()},
}
_MIXTRAL: Final = replace(
    _ARCHITECTURES["llama"],
    model_type="mixtral",
    layer_names=_experts("block_sparse_moe", ("w1", "w3", "w2")),
    num_experts="num_local_experts",
    expert_size="intermediate_size",
)


_GRANITE_HYBRID: Final = replace(
    _ARCHITECTURES["granitehybrid"],
    layer_names={**_experts("block_sparse_moe"), **_ARCHITECTURES["granitehybrid"].layer_names},
    keys=(*_ARCHITECTURES["granitehybrid"].keys, *_SIZES),
    constants={},
    num_experts="num_local_experts",
    expert_size="intermediate_size",
)
_WITH_EXPERTS: Final = {"llama": _MIXTRAL, "granitehybrid": _GRANITE_HYBRID}
"""Architectures that have experts if the number of them is not 0."""


def find_architecture(metadata: Metadata) -> tuple[str, Architecture]:
    """Return the architecture of a file, with its name; UnsupportedError lists those that Penstock runs."""
    name = metadata.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{metadata.file}: general.architecture: expected one of {', '.join(_ARCHITECTURES)}, found {show(name)}",
            param="general.architecture",
        )
    if name in _WITH_EXPERTS and metadata.integer(f"{name}.expert_count", 0):
        return name, _WITH_EXPERTS[name]
    return name, _ARCHITECTURES[name]


def architecture_of(model_type: str) -> tuple[str, Architecture] | None:
    """Return the architecture that a file of a family has, with its name; None for a family without one."""
    for name, architecture in {**_ARCHITECTURES, "llama-moe": _MIXTRAL}.items():
        if architecture.model_type == {"mistral": "llama"}.get(model_type, model_type):
            return name.removesuffix("-moe"), architecture
    return None
